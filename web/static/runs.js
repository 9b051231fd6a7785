// All runs on record, the newest first; those that go on are looked at again every few seconds.
import { $, duration, shortNumber, inPlace, make, say, size, whole } from './text.js';
const MOST = 200;
const FIRST = 40; // more than a window shows: the others come after it is painted
const WHEN = new Intl.DateTimeFormat([], { dateStyle: 'short', timeStyle: 'medium', hour12: false });
const COLUMNS = [
  ['run', one => make('a', { href: `/?run=${encodeURIComponent(one.id)}` }, one.name || `${one.mode}-${one.id.slice(0, 6)}`), 'text'],
  ['state', one => one.state, 'text'], ['mode', one => one.mode, 'text'], ['task', one => one.work, 'text'],
  ['started', one => WHEN.format(one.started_at * 1000), 'text'],
  ['workers', one => whole(one.num_workers || 0)], ['step', one => one.steps ? `${whole(one.step || 0)} / ${whole(one.steps)}` : whole(one.step || 0)],
  ['time', one => duration(one.elapsed_s)], ['loss', one => shortNumber(one.loss)],
  ['metrics', one => Object.entries(one.metrics || {}).map(([name, value]) => `${name} ${shortNumber(value)}`).join(', '), 'text'],
  ['traffic', one => one.num_bytes === null ? '–' : size(one.num_bytes)], ['ended by', one => one.ended_by || '', 'text why'],
];
let runs = [];
let shown = 0; // how often

const row = one => make('tr', { 'data-run': one.id }, ...COLUMNS.map(([, , kind]) => make('td', kind ? { class: kind } : {})));
function fill(node, one) { COLUMNS.forEach(([, cell], at) => { const value = cell(one); if (!(value instanceof Element)) say(node.cells[at], value); else if (node.cells[at].textContent !== value.textContent) node.cells[at].replaceChildren(value); }); }

function show() {
  const wanted = $('filter').value.trim().toLowerCase();
  const found = runs.filter(one => !wanted || [one.id, one.name, one.mode, one.work, one.state].some(text => String(text || '').toLowerCase().includes(wanted)));
  const table = $('runs');
  if (!table.tHead.rows.length) table.tHead.append(make('tr', {}, ...COLUMNS.map(([name, , kind]) => make('th', { scope: 'col', class: kind || '' }, name))));
  const body = table.tBodies[0], first = body.rows.length ? MOST : FIRST, turn = ++shown;
  const of = new Map(found.slice(0, MOST).map(one => [one.id, one])), keys = [...of.keys()];
  const put = most => inPlace(body, keys.slice(0, most), run => row(of.get(run)), (node, run) => fill(node, of.get(run)));
  put(first);
  if (found.length > first) requestAnimationFrame(() => setTimeout(() => { if (turn === shown) put(MOST); }));
  say($('count'), `${whole(found.length)} of ${whole(runs.length)} runs${found.length > MOST ? `, the newest ${MOST} are shown` : ''}`);
}

async function load() {
  try { runs = await fetch('/api/runs').then(answer => answer.json()); show(); } catch { $('count').textContent = 'nobody answers; trying again'; }
  setTimeout(load, runs.some(one => ['running', 'live'].includes(one.state)) ? 3000 : 15000);
}
$('filter').addEventListener('input', show);
load();
