// The table of workers: their states, and their sums over the run, which at the end are those of the summary.
// A row opens: the worker's log, what its script records, and how its bytes travel.
import { $, duration, inPlace, labelOf, make, nameOf, say, share, shortNumber, whole, written } from './text.js';
import { sparkline } from './charts.js';
import { areOfWorkers, rowControls } from './controls.js';
import { stateVar } from './palette.js';
const KEY = 'paramserver-hidden-columns';
const past = new Map(); // samples a second by rank, the last ones
const open = new Set(); // ranks whose row is open
const logs = new Map(); // by rank: {lines} or {error}
let run = 'live', now = null;

const HIDDEN = ['contributions', 'samples', 'received', 'stale max', 'restarts', 'transport', 'codec']; // at first
const kept = () => { try { return JSON.parse(localStorage.getItem(KEY)) || HIDDEN; } catch { return HIDDEN; } };
const hidden = new Set(kept());
// [heading, cell, class, help]: fixed columns, and the metrics of /api/metrics that some worker has between them.
function columns(metrics, workers) {
  const known = metrics.filter(metric => !metric.is_rare || workers.some(worker => worker[metric.name] !== null && worker[metric.name] !== undefined));
  return [
    ['worker', (worker, rates, node) => opener(worker, node)], ['state', (worker, rates, node) => stateMark(worker, node), 'text'], ['waits for', worker => worker.waiting_for, 'text why'],
    ...(areOfWorkers() ? [['controls', (worker, rates, node) => rowControls(worker, node), 'text']] : []),
    ['time', worker => shares(worker), '', 'Its time: computing, transfer, waiting.'],
    ...known.map(metric => [metric.label, worker => written(metric, worker[metric.name]), '', metric.help]),
    ['last minute', (worker, rates) => sparkline(rates), '', 'Samples per second in the last minute.'],
    ['transport', worker => worker.transport, 'text'], ['codec', worker => worker.codec, 'text'],
  ];
}

function opener(worker, node) {
  const { rank } = worker;
  const button = node || make('button', { type: 'button', class: 'small plain opener', 'aria-label': `log and details of ${nameOf(worker)}` });
  button.setAttribute('aria-expanded', String(open.has(rank)));
  say(button, `${open.has(rank) ? '▾' : '▸'} ${labelOf(worker)}`);
  button.onclick = () => { if (open.has(rank)) open.delete(rank); else { open.add(rank); readLog(rank); } showWorkers(...now); };
  return button;
}
function stateMark({ state, state_s: seconds }, node) {
  const mark = node || make('span', { class: 'state' });
  say(mark, seconds >= 5 ? `${state} ${duration(seconds)}` : state);
  mark.style.setProperty('--of-state', stateVar(state));
  return mark;
}
function shares(worker) {
  const parts = [['compute', worker.compute_share], ['transfer', worker.transfer_share], ['wait', worker.wait_share]];
  const text = `computing ${share(worker.compute_share)}, transfer ${share(worker.transfer_share)}, waiting ${share(worker.wait_share)}`;
  const bar = make('div', { class: 'shares', role: 'img', 'aria-label': text, title: text });
  for (const [name, part] of parts) { const piece = make('i', { class: name }); piece.style.width = `${part * 100}%`; bar.append(piece); }
  return bar;
}

// ---- an open row ----------------------------------------------------------------------------------------------

async function readLog(rank) {
  try {
    const reply = await fetch(`/api/runs/${encodeURIComponent(run)}/workers/${rank}/log`);
    logs.set(rank, await reply.json());
  } catch { logs.set(rank, { error: 'no reply' }); }
  const box = document.querySelector(`#workers [data-details="${rank}"]`);
  if (box) fillLog(box, rank);
}
function fillLog(box, rank) {
  const found = logs.get(rank), pre = box.querySelector('pre'), isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
  say(pre, !found ? 'reading …' : found.lines ? found.lines.join('\n') || 'no output yet' : [found.error, found.fix].filter(Boolean).join(': '));
  pre.classList.toggle('note', !found?.lines);
  if (isAtEnd) pre.scrollTop = pre.scrollHeight;
}
function details(rank) {
  return make('div', { 'data-details': rank }, make('dl', { class: 'tiles' }), make('h3', {}, `Log of worker ${rank}`), make('pre', { tabindex: 0, 'aria-label': `the newest lines of worker ${rank}` }));
}
function fillDetails(box, worker) {
  const found = new Map([...Object.entries(worker.recorded || {}).map(([name, value]) => [name, shortNumber(value)]), ['transport', [worker.transport, worker.transport_reason].filter(Boolean).join(': ')], ['codec', worker.codec]]);
  inPlace(box.firstChild, [...found.keys()], name => make('div', {}, make('dt', {}, name), make('dd')), (node, name) => say(node.lastChild, found.get(name)));
  fillLog(box, worker.rank);
}

// ---- the table ------------------------------------------------------------------------------------------------

function showMenu(all) {
  const sheet = $('worker-columns').lastElementChild, names = all.map(([name]) => name).filter(name => name !== 'worker');
  inPlace(sheet, names, name => {
    const box = make('input', { type: 'checkbox', value: name });
    box.checked = !hidden.has(name);
    box.addEventListener('change', () => {
      if (box.checked) hidden.delete(name); else hidden.add(name);
      try { localStorage.setItem(KEY, JSON.stringify([...hidden])); } catch { /* it is kept for this page alone */ }
      showWorkers(...now);
    });
    return make('label', {}, box, name);
  });
}

// `isNew`: a status came; without it the same is displayed again.
export function showWorkers(tick, metrics, name = run, isNew = false) {
  run = name; now = [tick, metrics];
  const table = $('workers'), { workers } = tick.status, all = columns(metrics, workers), displayed = all.filter(([column]) => !hidden.has(column));
  showMenu(all);
  const key = displayed.map(([column]) => column).join();
  if (table.dataset.columns !== key) {
    table.dataset.columns = key;
    table.tBodies[0].replaceChildren();
    table.tHead.replaceChildren(make('tr', {}, ...displayed.map(([column, , kind, help]) => make('th', { scope: 'col', class: kind || '', title: help || '' }, column))));
  }
  if (isNew) for (const worker of workers) {
    const rates = past.get(worker.rank) || [];
    rates.push(worker.samples_per_s); if (rates.length > 60) rates.shift();
    past.set(worker.rank, rates);
    if (open.has(worker.rank) && logs.get(worker.rank)?.lines) readLog(worker.rank);
  }
  const of = new Map(workers.map(worker => [`${worker.rank}`, worker])), keys = workers.flatMap(({ rank }) => open.has(rank) ? [`${rank}`, `${rank} more`] : [`${rank}`]);
  inPlace(table.tBodies[0], keys, row => row.endsWith('more') ? make('tr', { class: 'more' }, make('td', { colspan: displayed.length }, details(Number.parseInt(row, 10)))) : make('tr', { 'data-rank': row }, ...displayed.map(([, , kind]) => make('td', { class: kind || '' }))),
    (node, row) => {
      if (row.endsWith('more')) { fillDetails(node.firstChild.firstChild, of.get(row.split(' ')[0])); return; }
      displayed.forEach(([, cell, kind], at) => {
        const worker = of.get(row), value = cell(worker, past.get(worker.rank) || [], node.cells[at].firstElementChild);
        if (kind === 'text why') node.cells[at].title = value; // it may be cut
        if (!(value instanceof Element)) say(node.cells[at], value); else if (value !== node.cells[at].firstElementChild) node.cells[at].replaceChildren(value);
      });
    });
  $('left-out').textContent = tick.status.left_out ? `and ${whole(tick.status.left_out)} more, which are ahead of these` : '';
}
