// The comparison of selected runs: curves over each other, results as the server has compared them, and settings that differ.
import { $, inPlace, make, say, shortNumber, written } from './text.js';
import { balance, draw, forget, highlight, loaded } from './charts.js';
import { labelOf } from './columns.js';
import { faded, strokes } from './palette.js';
import { AXES, band, differences, grouped, joined, pointsOf, smoothed } from './curves.js';
// `compareRuns` gets {picked, left, state, metrics, changed, load(run), results(groups of ids)}; a report also {isFile}.
const MAX_DEFAULT = 3; // charts of evaluations, and of recorded metrics, that are open without being chosen
const MAX_IN_A_LABEL = 2;
const read = new Map(); // curves of runs by id, with what they were read at
let now = null, groups = [], results = null, isReading = false, frame = null, openGroups = new Set();

export async function compareRuns(all) {
  now = all;
  build();
  if (isReading) return;
  isReading = true;
  try {
    await loaded();
    for (;;) {
      const due = now.picked.filter(run => { const known = read.get(run.id); return !known || known.stamp !== stampOf(run); });
      if (!due.length) break;
      await Promise.all(due.slice(0, 6).map(async run => {
        read.set(run.id, { stamp: stampOf(run), curves: await now.load(run) || read.get(run.id)?.curves || null });
      }));
      paint();
    }
  } finally { isReading = false; }
  paint();
  readResults();
}
// Results are of certain groups at certain moments; another selection reads them again.
async function readResults() {
  const ids = groups.map(({ runs }) => runs.map(({ run }) => run.id)), key = JSON.stringify([ids, now.picked.map(stampOf)]);
  if (results?.key === key) return;
  results = { key, found: results?.found };
  const found = ids.length ? await now.results(ids) : null;
  if (results.key !== key) return;
  results = { key, found };
  paint();
}
const stampOf = run => ['running', 'live'].includes(run.state) ? `${run.state} ${run.version} ${run.step} ${run.elapsed_s}` : run.state;

// ---- groups, their names and colors -----------------------------------------------------------------------

function regroup() {
  const all = now.picked.map(run => { const known = read.get(run.id)?.curves; return known && { ...known, run: { ...known.run, ...run } }; }).filter(Boolean);
  const found = grouped(all, now.state.seeds).sort((a, b) => a[0].run.mode < b[0].run.mode ? -1 : a[0].run.mode > b[0].run.mode ? 1 : 0);
  const differ = differences(found), styles = strokes(found.map(group => group[0].run.mode));
  groups = found.map((runs, at) => ({ runs, id: runs[0].run.id, ...styles[at], label: '', mode: runs[0].run.mode }));
  const tasks = new Set(all.map(curves => curves.run.work));
  groups.forEach((group, at) => {
    const alike = groups.map((other, index) => index).filter(index => groups[index].mode === group.mode && groups[index].runs[0].run.work === group.runs[0].run.work);
    const parts = differ.filter(([name, values]) => !['run.mode', 'run.seed'].includes(name) && alike.some(index => JSON.stringify(values[index]) !== JSON.stringify(values[at])))
      .map(([name, values]) => `${name.slice(name.lastIndexOf('.') + 1)} ${values[at] ?? 'none'}`);
    const apart = alike.length === 1 ? '' : parts.length && parts.length <= MAX_IN_A_LABEL ? parts.join(', ') : group.id.slice(0, 6);
    const name = group.runs[0].group || (group.runs.length === 1 ? group.runs[0].run.name : null);
    group.label = name || [group.mode, tasks.size > 1 ? group.runs[0].run.work : '', apart].filter(Boolean).join(' ');
    group.shown = group.runs.length > 1 ? `${group.label} (${group.runs.length} seeds)` : group.label;
  });
  const names = new Map();
  for (const group of groups) names.set(group.shown, [...(names.get(group.shown) || []), group]);
  for (const same of names.values()) if (same.length > 1) for (const group of same) group.shown = group.label = `${group.label} ${group.id.slice(0, 6)}`;
  return differ;
}

// ---- the frame -----------------------------------------------------------------------------------------------

function build() {
  if (frame) return;
  const host = $('comparison'), select = make('select', { id: 'x' }, ...Object.entries(AXES).map(([name, [, label]]) => make('option', { value: name }, label)));
  const smooth = make('input', { type: 'range', id: 'smooth', min: 0, max: 0.98, step: 0.02 }), amount = make('output', { for: 'smooth' });
  const box = (id, text, title) => { const input = make('input', { type: 'checkbox', id }); return [input, make('label', { title }, input, text)]; };
  const [logX, logXLabel] = box('log-x', 'log x', 'Logarithmic x axis'), [logY, logYLabel] = box('log-y', 'log y', 'Logarithmic y axis'), [seeds, seedsLabel] = box('seeds', 'seeds as bands', 'Runs that differ only in the seed are one band from least to most, with their mean.');
  const link = make('button', { type: 'button', id: 'share', title: 'This address shows the same runs, columns and charts.' }, 'Copy link');
  const menu = make('details', { class: 'menu right', id: 'chart-menu' }, make('summary', {}, 'Charts'), make('div', { class: 'sheet' }));
  frame = {
    notes: make('div', { id: 'comparison-notes', role: 'status' }), legend: make('div', { class: 'legend', id: 'comparison-legend', role: 'group', 'aria-label': 'Curves; a button hides or shows one' }), charts: make('div', { class: 'charts', id: 'comparison-charts' }),
    results: make('table', { id: 'results' }, make('caption', { class: 'hidden' }, 'Results of the selected runs; the best value of each metric is marked'), make('thead'), make('tbody')),
    settings: make('table', { id: 'differences' }, make('caption', { class: 'hidden' }, 'Settings in which the selected runs differ'), make('thead'), make('tbody')), same: make('p', { class: 'note' }), menu, select, smooth, amount, logX, logY, seeds, link,
  };
  host.replaceChildren(
    make('div', { class: 'card' }, make('div', { class: 'tools head' }, make('h2', { id: 'h-comparison' }, 'Comparison'), make('label', {}, 'over', select), make('label', { title: 'Exponential moving average' }, 'smooth', smooth, amount), logYLabel, logXLabel, seedsLabel, make('span', { class: 'push' }), menu, ...(now.isFile ? [] : [link])), frame.notes, frame.legend),
    frame.charts,
    make('div', { class: 'card' }, make('h2', { class: 'head' }, 'Results'), make('div', { class: 'scroll' }, frame.results)),
    make('div', { class: 'card' }, make('h2', { class: 'head' }, 'Settings that differ'), frame.same, make('div', { class: 'scroll' }, frame.settings)),
  );
  const changes = (node, event, act) => node.addEventListener(event, () => { act(); now.changed(); });
  changes(select, 'change', () => { now.state.x = select.value; });
  changes(smooth, 'input', () => { now.state.smooth = Number(smooth.value); });
  changes(seeds, 'change', () => { now.state.seeds = seeds.checked; });
  for (const input of [logX, logY]) changes(input, 'change', () => { now.state.log = (logX.checked ? 'x' : '') + (logY.checked ? 'y' : ''); });
  link.addEventListener('click', async () => { try { await navigator.clipboard.writeText(location.href); say(link, 'Link copied'); } catch { say(link, 'Copy it from the address bar'); } setTimeout(() => say(link, 'Copy link'), 2500); });
  menu.addEventListener('keydown', event => { if (event.key === 'Escape') { menu.open = false; menu.firstChild.focus(); } });
  document.addEventListener('click', event => { if (!menu.contains(event.target)) menu.open = false; });
  addEventListener('resize', () => paint());
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => paint());
}

function sentences() {
  const { picked, left } = now, tasks = [...new Set(picked.map(run => run.work || 'a script'))].sort(), models = new Set(picked.map(run => run.model).filter(Boolean)), notes = [];
  if (tasks.length > 1) notes.push(`The runs have different tasks (${tasks.join(', ')}): compare times, waits and traffic, not losses and accuracies.`);
  else if (models.size > 1) notes.push('The runs train different models: each metric is of its own model.');
  if (left) notes.push(`The first ${picked.length} of ${picked.length + left} selected runs are compared.`);
  const gone = picked.filter(run => read.has(run.id) && !read.get(run.id).curves);
  for (const row of results?.found?.rows || []) { const group = row.note && groups.find(({ id }) => id === row.label); if (group) notes.push(`${group.shown} ${row.note}.`); }
  if (gone.length) notes.push(`${gone.map(labelOf).join(', ')} cannot be read any more.`);
  return notes;
}

// ---- what is drawn ------------------------------------------------------------------------------------------

// The metrics that some of the runs have over time: [key, label, unit, written].
function drawable() {
  const found = new Map();
  for (const metric of now.metrics.recorded) {
    if (metric.name === 'steps' || !groups.some(({ runs }) => runs.some(({ series }) => series[metric.name]?.some(value => typeof value === 'number' && value !== 0)))) continue;
    found.set(metric.name, { label: metric.name === 'loss' ? 'training loss' : metric.label, help: metric.help, format: value => written(metric, value), ticks: ['bytes', 'duration', 'share'].includes(metric.unit) ? value => written(metric, value) : null });
  }
  for (const { runs } of groups) for (const { series } of runs) for (const name of Object.keys(series)) if (name.startsWith('recorded.') && !found.has(name)) found.set(name, { label: name.slice(9), help: `${name.slice(9)}, recorded by the scripts: mean of the workers.`, format: shortNumber, ticks: null });
  for (const { runs } of groups) for (const { evaluations } of runs) for (const point of evaluations) for (const name of Object.keys(point.metrics)) if (!found.has(`eval.${name}`)) found.set(`eval.${name}`, { label: `${name}, evaluated`, help: `Value of ${name} in the task’s evaluations.`, format: shortNumber, ticks: null });
  return found;
}
const startingWith = (known, start) => [...known.keys()].filter(key => key.startsWith(start)).slice(0, MAX_DEFAULT);
const defaults = known => [...startingWith(known, 'eval.'), ...['loss', 'samples_per_s'].filter(key => known.has(key)), ...startingWith(known, 'recorded.')];

function chartOf(key, metric) {
  const { state } = now, curves = [], series = [], bands = [];
  for (const group of groups) {
    const raw = group.runs.map(run => pointsOf(run, key, state.x)).filter(points => points.length), isHidden = state.hide.includes(group.id), style = { stroke: group.stroke, dash: group.dash, group: group.id, isHidden };
    if (!raw.length) continue;
    const soft = raw.map(points => smoothed(points, state.smooth)), isDotted = key.startsWith('eval.') && raw[0].length < 60;
    if (soft.length === 1) {
      if (state.smooth && !isHidden) { curves.push(raw[0]); series.push({ ...style, label: group.shown, alpha: 0.22, width: 1, dash: [], isAside: true }); }
      curves.push(soft[0]); series.push({ ...style, label: group.shown, isDotted });
      continue;
    }
    const { xs, mean, low, high } = band(soft), of = column => xs.map((x, at) => [x, column[at]]);
    curves.push(of(high), of(low), of(mean));
    series.push({ ...style, label: 'most', isEdge: true, isAside: true }, { ...style, label: 'least', isEdge: true, isAside: true }, { ...style, label: group.shown, isDotted, width: 2.2 });
    bands.push({ series: [series.length - 2, series.length - 1], fill: faded(group.stroke, 0.18) });
  }
  if (!curves.length) return null;
  const label = AXES[state.x][1], columns = joined(curves);
  const [, , formatX, tickX] = AXES[state.x];
  return { series, bands, columns, axis: label, formatX, tickX, unit: metric.label.replace(', evaluated', ''), logX: state.log.includes('x'), logY: state.log.includes('y'), sync: 'compared', format: metric.format, tickY: metric.ticks };
}

export function paint() {
  if (!now || !frame || !globalThis.uPlot) return;
  const { state } = now, differ = regroup(), known = drawable(), chosen = state.y || defaults(known);
  frame.select.value = state.x in AXES ? state.x : 'step';
  if (!(state.x in AXES)) state.x = 'step';
  frame.smooth.value = state.smooth; say(frame.amount, state.smooth ? state.smooth.toFixed(2) : 'off');
  frame.logX.checked = state.log.includes('x'); frame.logY.checked = state.log.includes('y'); frame.seeds.checked = state.seeds;
  const drawn = chosen.map(key => [key, known.get(key)]).filter(([, metric]) => metric).map(([key, metric]) => [key, metric, chartOf(key, metric)]);
  const empty = drawn.filter(([, , chart]) => !chart).map(([, metric]) => metric.label), missing = groups.length ? chosen.filter(key => !known.has(key)) : [];
  const notes = sentences();
  if (empty.length) notes.push(`${empty.join(', ')}: not known over ${AXES[state.x][1]}.`);
  if (missing.length) notes.push(`No selected run has ${missing.map(key => key.replace('eval.', '')).join(', ')} over time.`);
  inPlace(frame.notes, notes, text => make('p', { class: 'warning' }, text));
  showLegend();
  const charts = new Map(drawn.filter(([, , chart]) => chart).map(([key, metric, chart]) => [key, [metric, chart]]));
  for (const card of [...frame.charts.children]) if (!charts.has(card.dataset.key)) forget(card.querySelector('.chart'));
  inPlace(frame.charts, [...charts.keys()], key => make('div', { class: 'card' }, make('div', { class: 'head' }, make('h3', { title: charts.get(key)[0].help }, charts.get(key)[0].label)), make('div', { class: 'chart', 'data-chart': key })));
  balance(frame.charts, 340);
  for (const card of frame.charts.children) draw(card.lastChild, charts.get(card.dataset.key)[1]);
  showResults(); showSettings(differ); showMenu(known, chosen);
  for (const node of document.querySelectorAll('#runs tbody tr')) {
    const group = groups.find(({ runs }) => runs.some(({ run }) => run.id === node.dataset.run));
    node.style.setProperty('--of-run', group ? group.stroke : 'transparent');
  }
}

function swatch(group) { const mark = make('i'); mark.style.background = group.dash.length ? `repeating-linear-gradient(90deg, ${group.stroke} 0 4px, transparent 4px 6px)` : group.stroke; return mark; }

function showLegend() {
  const of = new Map(groups.map(group => [`${group.id} ${group.stroke} ${group.dash}`, group]));
  inPlace(frame.legend, [...of.keys()], key => {
    const group = of.get(key), button = make('button', { type: 'button' }, swatch(group), make('span'));
    const each = act => { for (const host of frame.charts.querySelectorAll('.chart')) act(host); };
    button.addEventListener('click', () => { const { state } = now; state.hide = state.hide.includes(group.id) ? state.hide.filter(id => id !== group.id) : [...state.hide, group.id]; now.changed(); });
    for (const event of ['mouseenter', 'focus']) button.addEventListener(event, () => each(host => highlight(host, group.id)));
    for (const event of ['mouseleave', 'blur']) button.addEventListener(event, () => each(host => highlight(host, null)));
    return button;
  }, (button, key) => { const group = of.get(key); say(button.lastChild, group.shown); button.setAttribute('aria-pressed', String(!now.state.hide.includes(group.id))); });
}

function showMenu(known, chosen) {
  const sheet = frame.menu.lastChild, key = JSON.stringify([[...known.keys()], chosen]);
  if (sheet.dataset.key === key) return;
  sheet.dataset.key = key;
  sheet.replaceChildren(...[...known].map(([name, metric]) => {
    const box = make('input', { type: 'checkbox', value: name });
    box.checked = chosen.includes(name);
    box.addEventListener('change', () => { now.state.y = box.checked ? [...chosen, name] : chosen.filter(other => other !== name); now.changed(); });
    return make('label', { title: metric.help }, box, metric.label);
  }));
}

// ---- tables -----------------------------------------------------------------------------------------------------

function showResults() {
  const { columns, rows } = results?.found || { columns: [], rows: [] }, shown = rows.filter(({ label }) => groups.some(({ id }) => id === label));
  frame.results.tHead.replaceChildren(make('tr', {}, make('th', { scope: 'col' }, 'runs'), ...columns.map(column => make('th', { scope: 'col', title: column.help }, column.label))));
  frame.results.tBodies[0].replaceChildren(...shown.flatMap(row => {
    const group = groups.find(({ id }) => id === row.label), isFolded = group.runs.length > 1, isOpen = openGroups.has(group.id), name = make('th', { scope: 'row' }, swatchCell(group));
    if (isFolded) {
      const button = make('button', { type: 'button', class: 'small plain', 'aria-expanded': String(isOpen), 'aria-label': `the ${group.runs.length} runs of ${group.label}` }, isOpen ? '▾' : '▸');
      button.addEventListener('click', () => { if (isOpen) openGroups.delete(group.id); else openGroups.add(group.id); showResults(); });
      name.append(' ', button);
    }
    const cells = row.cells.map(found => {
      const cell = make('td', found.is_best ? { class: 'best', title: 'the best of the selected runs' } : {}, found.text);
      if (found.low) cell.append(make('span', { class: 'range' }, ` ${found.low} – ${found.high}`));
      if (found.is_best) cell.append(make('span', { class: 'hidden' }, ' best'));
      return cell;
    });
    const members = isFolded && isOpen ? group.runs.map(({ run, settings }, at) => make('tr', { class: 'member' }, make('th', { scope: 'row' }, memberName(run, settings)), ...(row.members[at] || []).map(text => make('td', { class: 'range' }, text)))) : [];
    return [make('tr', { 'data-group': group.id }, name, ...cells), ...members];
  }));
}
function memberName(run, settings) {
  const seed = `seed ${settings['run.seed'] ?? '?'}`;
  return now.isFile ? make('span', {}, 'run.seed' in settings ? seed : run.id) : make('a', { href: `/?run=${encodeURIComponent(run.id)}` }, `${seed}: ${labelOf(run)}`);
}
function swatchCell(group) { const line = make('span', { class: 'mode' }, group.shown); line.style.setProperty('--of-mode', group.stroke); return line; }

function showSettings(differ) {
  const text = value => value === undefined || value === null ? '–' : typeof value === 'object' ? JSON.stringify(value) : String(value);
  say(frame.same, groups.length < 2 ? 'Select a second run to compare settings.' : differ.length ? '' : 'These runs have the same settings.');
  frame.same.hidden = !frame.same.textContent;
  frame.settings.hidden = !differ.length;
  frame.settings.tHead.replaceChildren(make('tr', {}, make('th', { scope: 'col' }, 'setting'), ...groups.map(group => make('th', { scope: 'col', class: 'text' }, swatchCell(group)))));
  frame.settings.tBodies[0].replaceChildren(...differ.map(([name, values]) => make('tr', {}, make('th', { scope: 'row' }, name), ...values.map(value => make('td', { class: 'text' }, text(value))))));
}
