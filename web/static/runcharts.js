// The curves of one run, and its contributions by staleness.
import { $, color, inPlace, make, say, written } from './text.js';
import { balance, draw, forget } from './charts.js';
import { modeColor } from './palette.js';
import { AXES, pointsOf, smoothed } from './curves.js';
const MAX_RECORDED = 4; // charts of recorded metrics that are open without being chosen
const chosen = new Map(); // further metrics by name: whether each is displayed
let recorded = [];
const isOpen = name => chosen.get(name) ?? recorded.includes(name);

function chartOf(state, key, label, unit, isDotted, metric) {
  const axis = $('axis').value, [, name, formatX, tickX] = AXES[axis], weight = Number($('smooth').value), points = pointsOf(state, key, axis), stroke = modeColor(state.newest.status.mode), soft = smoothed(points, weight);
  const series = [{ label, stroke, isDotted }], columns = [points.map(([x]) => x), soft.map(([, y]) => y)];
  if (soft !== points) { series.unshift({ label, stroke, alpha: 0.25, width: 1, isAside: true }); columns.splice(1, 0, points.map(([, y]) => y)); }
  return { series, columns, axis: name, formatX, tickX, unit, logY: $('log-y').checked, sync: 'run', ...(metric ? { format: value => written(metric, value), tickY: ['bytes', 'duration', 'share'].includes(metric.unit) ? value => written(metric, value) : null } : {}) };
}

// A card for each further metric; the first three are in the page.
function showMore(state, cards) {
  const host = $('curves');
  for (const node of [...host.children]) if (node.dataset.extra && !cards.has(node.dataset.key)) { forget(node.lastChild); node.remove(); }
  for (const [key, [label, , help]] of cards) {
    let card = [...host.children].find(node => node.dataset.key === key);
    if (!card) { card = make('div', { class: 'card', 'data-key': key, 'data-extra': '1' }, make('div', { class: 'head' }, make('h3', { title: help }, label)), make('div', { class: 'chart' })); $('rate').parentElement.before(card); }
  }
  balance(host, Math.max(265, host.clientWidth / 5.5));
  for (const [key, [label, unit, , metric]] of cards) draw([...host.children].find(node => node.dataset.key === key).lastChild, chartOf(state, key, label, unit, key.startsWith('eval.'), metric));
}

function showMenu(state, metrics, redraw) {
  const sheet = $('chart-menu').lastElementChild, names = metrics.filter(({ name }) => !['loss', 'samples_per_s', 'steps', 'step'].includes(name) && state.series[name]?.some(value => typeof value === 'number'));
  inPlace(sheet, names.map(({ name }) => name), name => {
    const metric = metrics.find(item => item.name === name), box = make('input', { type: 'checkbox', value: name });
    box.checked = isOpen(name);
    box.addEventListener('change', () => { chosen.set(name, box.checked); redraw(); });
    return make('label', { title: metric.help }, box, metric.label);
  });
}

let redraw = () => {};
// `again` draws all charts anew, after a change of the axis and the like.
export function remadeCharts(again) {
  redraw = again;
  for (const [id, event] of [['axis', 'change'], ['smooth', 'input'], ['log-y', 'change']]) $(id).addEventListener(event, () => redraw());
}

// What scripts record has no entry in the table of metrics.
const withRecorded = (state, metrics) => [...metrics, ...Object.keys(state.series).filter(name => name.startsWith('recorded.')).map(name => ({ name, label: name.slice(9), help: `${name.slice(9)}, recorded by the script: mean of the workers.`, unit: 'number' }))];
export function showCharts(state, known) {
  const metrics = withRecorded(state, known);
  recorded = metrics.slice(known.length, known.length + MAX_RECORDED).map(({ name }) => name);
  const names = [...new Set(state.evaluations.flatMap(point => Object.keys(point.metrics)))];
  const cards = new Map(names.slice(1).map(name => [`eval.${name}`, [`${name}, evaluated`, name, '']]));
  for (const metric of metrics) if (isOpen(metric.name)) cards.set(metric.name, [metric.label, metric.label, metric.help, metric]);
  showMore(state, cards);
  if (pointsOf(state, 'loss', 'step').length) draw($('loss'), chartOf(state, 'loss', 'loss', 'loss'));
  else if (!$('loss').firstElementChild) $('loss').replaceChildren(make('p', { class: 'empty' }, 'none yet; a script reports it with session.record(loss=...)'));
  draw($('rate'), chartOf(state, 'samples_per_s', 'samples/s', 'samples/s'));
  if (names.length) { say($('h-evaluations'), `${names[0]}, evaluated`); draw($('evaluations'), chartOf(state, `eval.${names[0]}`, names[0], names[0], true)); } else if (!$('evaluations').firstElementChild) $('evaluations').replaceChildren(make('p', { class: 'empty' }, 'none yet; run.eval_every asks for them'));
  showMenu(state, metrics, () => redraw());
  const bins = Object.entries(state.newest.staleness).map(([behind, count]) => [Number(behind), count]).sort((a, b) => a[0] - b[0]);
  if (bins.length) draw($('staleness'), { kind: 'bars', series: [{ label: 'contributions', stroke: color('accent') }], axis: 'versions behind', unit: 'contributions', columns: [bins.map(bin => bin[0]), bins.map(bin => bin[1])] });
  else if (!$('staleness').firstElementChild) $('staleness').replaceChildren(make('p', { class: 'empty' }, 'no contributions yet'));
}
