// The columns of the list of runs: fields, metrics of the table of metrics, results of evaluations, and settings.
import { make, shortNumber, whole, written } from './text.js';
import { modeVar } from './palette.js';
const WHEN = new Intl.DateTimeFormat([], { dateStyle: 'short', timeStyle: 'medium', hour12: false });
export const DEFAULTS = ['name', 'tags', 'state', 'mode', 'work', 'started_at', 'num_workers', 'step', 'elapsed_s', 'loss', 'eval.*', 'samples_per_s', 'num_bytes', 'ended_by'];
const ALIASES = { run: 'name', task: 'work', tag: 'tags', started: 'started_at', workers: 'num_workers', time: 'elapsed_s', traffic: 'num_bytes', bytes: 'num_bytes', steps: 'step', waiting: 'wait_share', staleness: 'staleness_mean' };
const MAX_EVALUATED = 4; // columns of evaluations that are displayed without being chosen

// As StoredRun.label.
export const labelOf = run => run.name || [...[run.work, run.mode].map(text => (text || '').split(/[ :/]/).pop().replace(/\.py$/, '')), run.key || run.id.slice(0, 6)].filter(Boolean).join('-');
export function modeMark(mode) {
  const mark = make('span', { class: 'mode' }, mode);
  mark.style.setProperty('--of-mode', modeVar(mode));
  return mark;
}
const tagsOf = (run, onTag) => make('span', { class: 'tags' }, ...(run.tags || []).map(tag => { const node = make('button', { class: 'pill tag small', type: 'button', title: `show runs with the tag ${tag}` }, tag); node.addEventListener('click', () => onTag(tag)); return node; }));

function fields(onTag) {
  const text = (key, label, get = run => run[key] || '') => ({ key, label, kind: 'text', value: get, cell: get, group: 'Run' });
  return [
    { ...text('name', 'run', labelOf), cell: run => make('span', { class: 'name' }, make('i'), make('a', { href: `/?run=${encodeURIComponent(run.id)}` }, labelOf(run))) },
    { ...text('tags', 'tags', run => (run.tags || []).join(' ')), list: run => run.tags || [], cell: run => tagsOf(run, onTag) },
    { ...text('state', 'state'), cell: run => make('span', { class: 'pill', 'data-state': run.state }, run.state) },
    { ...text('mode', 'mode'), cell: run => modeMark(run.mode) },
    text('work', 'task'),
    { ...text('started_at', 'started'), value: run => run.started_at, cell: run => WHEN.format(run.started_at * 1000) },
    { ...text('ended_by', 'ended by'), kind: 'text why' }, text('id', 'id'), text('project', 'project'), text('note', 'note'),
  ];
}

const wholeStep = run => run.steps ? `${whole(run.step || 0)} / ${whole(run.steps)}` : whole(run.step || 0);

// All columns of these runs, by key. `settings`: by run and key, of the runs in which they differ.
export function columnsOf(runs, metrics, settings, onTag) {
  const found = new Map(fields(onTag).map(column => [column.key, column]));
  const add = column => found.has(column.key) || found.set(column.key, column);
  for (const metric of metrics.recorded) {
    const value = run => run[metric.name] ?? null;
    add({ key: metric.name, label: metric.label, help: metric.help, group: 'Metrics', metric, value, cell: metric.name === 'step' ? wholeStep : run => written(metric, value(run)) });
  }
  for (const name of [...new Set(runs.flatMap(run => Object.keys(run.recorded || {})))].sort()) {
    const value = run => run.recorded?.[name] ?? null;
    add({ key: `recorded.${name}`, label: name, help: `${name}, recorded by the script: newest mean of the workers.`, group: 'Recorded by scripts', value, cell: run => shortNumber(value(run)) });
  }
  const evaluated = new Map();
  for (const run of runs) for (const name of Object.keys(run.metrics || {})) evaluated.set(name, (evaluated.get(name) || 0) + 1);
  for (const name of [...evaluated.keys()].sort((a, b) => evaluated.get(b) - evaluated.get(a))) {
    const value = run => run.metrics?.[name] ?? null;
    add({ key: `eval.${name}`, label: metrics.recorded.some(metric => metric.label === name) ? `${name} (evaluated)` : name, help: `Final value of ${name}, or that of the newest evaluation.`, group: 'Evaluations', value, cell: run => shortNumber(value(run)) });
  }
  for (const name of [...new Set(Object.values(settings).flatMap(Object.keys))].sort()) {
    const value = run => settings[run.id]?.[name] ?? null;
    add({ key: `set.${name}`, label: name, help: `The setting ${name}.`, group: 'Settings in which runs differ', value, cell: run => { const known = value(run); return known === null ? '–' : String(known); } });
  }
  return found;
}

// The column that a name in the filter or the address means: its key, its label, or the end of a setting's name.
export function resolved(name, columns) {
  const wanted = ALIASES[name] || name;
  for (const key of [wanted, `eval.${wanted}`, `recorded.${wanted}`, `set.${wanted}`]) if (columns.has(key)) return columns.get(key);
  return [...columns.values()].find(column => column.label.replaceAll(' ', '_') === wanted) || [...columns.values()].find(column => column.key.startsWith('set.') && column.key.endsWith(`.${wanted}`)) || null;
}

export function displayed(keys, columns) {
  return keys.flatMap(key => key === 'eval.*' ? [...columns.values()].filter(column => column.group === 'Evaluations').slice(0, MAX_EVALUATED) : columns.get(key) || []);
}
