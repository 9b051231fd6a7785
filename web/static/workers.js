// The table of workers: their states, and their sums over the run, which at the end are those of the summary.
import { $, inPlace, make, say, share, whole, written } from './text.js';
import { sparkline } from './charts.js';
import { areOfWorkers, rowControls } from './controls.js';
import { stateVar } from './palette.js';
// [heading, cell, class, help]: fixed columns, and the metrics of /api/metrics between them.
const columns = metrics => [
  ['worker', now => now.rank], ['state', (now, rates, node) => stateMark(now.state, node), 'text'],
  ...(areOfWorkers() ? [['controls', (now, rates, node) => rowControls(now, node), 'text']] : []),
  ...metrics.map(metric => [metric.label, now => written(metric, now[metric.name]), '', metric.help]),
  ['', (now, past) => sparkline(past)], ['time', now => shares(now)],
  ['transport', now => now.transport, 'text'], ['codec', now => now.codec, 'text'], ['waits for', now => now.waiting_for, 'text why'],
];
const past = new Map(); // samples a second by rank, the last ones

function stateMark(state, node) {
  const mark = node || make('span', { class: 'state' });
  say(mark, state);
  mark.style.setProperty('--of-state', stateVar(state));
  return mark;
}
function shares(now) {
  const parts = [['compute', now.compute_share], ['transfer', now.transfer_share], ['wait', now.wait_share]];
  const text = `computing ${share(now.compute_share)}, transfer ${share(now.transfer_share)}, waiting ${share(now.wait_share)}`;
  const bar = make('div', { class: 'shares', role: 'img', 'aria-label': text, title: text });
  for (const [name, part] of parts) { const piece = make('i', { class: name }); piece.style.width = `${part * 100}%`; bar.append(piece); }
  return bar;
}

export function showWorkers(tick, metrics) {
  const table = $('workers'), displayed = columns(metrics);
  const key = displayed.map(([name]) => name).join();
  if (table.dataset.columns !== key) {
    table.dataset.columns = key;
    table.tBodies[0].replaceChildren();
    table.tHead.replaceChildren(make('tr', {}, ...displayed.map(([name, , kind, help]) => make('th', { scope: 'col', class: kind || '', title: help || '' }, name))));
  }
  const rows = tick.status.workers.map(now => {
    const rates = past.get(now.rank) || [];
    rates.push(now.samples_per_s); if (rates.length > 60) rates.shift();
    past.set(now.rank, rates);
    return [now.rank, [now, rates]];
  });
  const of = new Map(rows);
  inPlace(table.tBodies[0], [...of.keys()], rank => make('tr', { 'data-rank': rank }, ...displayed.map(([, , kind]) => make('td', { class: kind || '' }))),
    (node, rank) => displayed.forEach(([, cell], at) => {
      const value = cell(...of.get(rank), node.cells[at].firstElementChild);
      if (!(value instanceof Element)) say(node.cells[at], value); else if (value !== node.cells[at].firstElementChild) node.cells[at].replaceChildren(value);
    }));
  $('left-out').textContent = tick.status.left_out ? `and ${whole(tick.status.left_out)} more, which are ahead of these` : '';
}
