// The table of workers: what each does now, and its sums over the run, which at the end are those of the summary.
import { $, figure, inPlace, make, say, share, size, whole } from './text.js';
import { sparkline } from './charts.js';
const COLUMNS = [
  ['worker', now => now.rank], ['state', now => now.state, 'text'], ['step', now => whole(now.step)], ['lead', now => now.lead],
  ['stale mean', now => now.staleness_mean.toFixed(2)], ['stale max', now => now.staleness_max], ['loss', now => figure(now.loss)],
  ['samples/s', now => whole(now.samples_per_s)], ['', (now, past) => sparkline(past)], ['time', now => shares(now)],
  ['contributions', now => now.contributions === null ? '–' : whole(now.contributions)], ['samples', now => whole(now.samples)],
  ['sent', now => size(now.bytes_sent)], ['received', now => size(now.bytes_received)],
  ['lane', now => now.lane, 'text'], ['codec', now => now.codec, 'text'], ['restarts', now => now.restarts],
  ['waits for', now => now.waiting_for, 'text why'],
];
const past = new Map(); // samples a second by rank, the last ones

function shares(now) {
  const parts = [['compute', now.compute_share], ['transfer', now.transfer_share], ['wait', now.wait_share]];
  const text = `computing ${share(now.compute_share)}, transfer ${share(now.transfer_share)}, waiting ${share(now.wait_share)}`;
  const bar = make('div', { class: 'shares', role: 'img', 'aria-label': text, title: text });
  for (const [name, part] of parts) { const piece = make('i', { class: name }); piece.style.width = `${part * 100}%`; bar.append(piece); }
  return bar;
}

export function showWorkers(tick) {
  const table = $('workers');
  if (!table.tHead.rows.length) table.tHead.append(make('tr', {}, ...COLUMNS.map(([name, , kind]) => make('th', { scope: 'col', class: kind || '' }, name))));
  const rows = tick.status.workers.map(now => {
    const rates = past.get(now.rank) || [];
    rates.push(now.samples_per_s); if (rates.length > 60) rates.shift();
    past.set(now.rank, rates);
    return [now.rank, COLUMNS.map(([, cell]) => cell(now, rates))];
  });
  const of = new Map(rows);
  inPlace(table.tBodies[0], [...of.keys()], rank => make('tr', { 'data-rank': rank }, ...COLUMNS.map(([, , kind]) => make('td', { class: kind || '' }))),
    (node, rank) => of.get(rank).forEach((value, at) => { if (value instanceof Element) node.cells[at].replaceChildren(value); else say(node.cells[at], value); }));
  $('left-out').textContent = tick.status.left_out ? `and ${whole(tick.status.left_out)} more, which are ahead of these` : '';
}
