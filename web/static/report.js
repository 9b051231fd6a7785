// The report: the comparison of the dashboard, of runs that are in this file (web/stored.py), with what a command adds.
import { $, color, make, whole } from './text.js';
import { draw } from './charts.js';
import { compareRuns, paint } from './compare.js';
import { joined } from './curves.js';
const CAUSES = { computing: 'compute', 'waiting for the mode': 'wait', 'waiting to upload': 'bad', "server's work": 'apply', "server's link": 'accent', 'own link': 'transfer' };
const OTHERS = ['accent', 'compute', 'transfer', 'apply', 'bad', 'good', 'wait'];
const data = JSON.parse($('data').textContent), of = new Map(data.runs.map(curves => [curves.run.id, curves]));
const state = { x: 'step', y: null, smooth: 0, log: '', seeds: true, hide: [] };

const show = () => compareRuns({ picked: data.runs.map(curves => curves.run), left: 0, state, metrics: data.metrics, isFile: true, results: async () => data.results[state.seeds ? 'together' : 'alone'], changed: show, load: async run => of.get(run.id) });

// Tables and pictures of a command, such as where a simulation's time went.
function table([head, rows]) {
  return make('div', { class: 'card' }, make('div', { class: 'scroll' }, make('table', {}, make('thead', {}, make('tr', {}, ...head.map(name => make('th', { scope: 'col' }, name)))), make('tbody', {}, ...rows.map(row => make('tr', {}, ...row.map(cell => make('td', {}, cell))))))));
}
function picture([, name, unit, curves]) {
  const strokes = curves.map(([label], at) => color(CAUSES[label] || OTHERS[at % OTHERS.length])), host = make('div', { class: 'chart' });
  const legend = make('p', { class: 'legend' }, ...curves.map(([label], at) => { const mark = make('i'); mark.style.background = strokes[at]; return make('span', {}, mark, label); }));
  $('extra').append(make('div', { class: 'card' }, make('h3', { class: 'head' }, name), legend, host));
  draw(host, { series: curves.map(([label], at) => ({ label, stroke: strokes[at] })), columns: joined(curves.map(([, points]) => points)), axis: unit, unit: '' });
}
function showExtra() {
  $('extra').replaceChildren();
  data.pictures.forEach(picture);
}
for (const found of data.tables) $('extra').before(table(found));
for (const text of data.notes) $('notes').append(make('p', { class: 'note' }, text));
$('findings').hidden = !$('findings').querySelector('li, #notes p');
$('count').textContent = `${whole(data.runs.length)} runs`;
show(); showExtra();
for (const [target, event] of [[window, 'resize'], [matchMedia('(prefers-color-scheme: dark)'), 'change']]) target.addEventListener(event, () => { paint(); showExtra(); });
