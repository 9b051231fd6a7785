// All runs of the run store, the newest first; runs in progress are read again every few seconds.
import { $, duration, shortNumber, inPlace, make, say, size, whole } from './text.js';
const MAX_SHOWN = 200;
const FIRST = 40; // more than a window shows; the others follow after the first paint
const WHEN = new Intl.DateTimeFormat([], { dateStyle: 'short', timeStyle: 'medium', hour12: false });
const COLUMNS = [
  ['run', run => make('a', { href: `/?run=${encodeURIComponent(run.id)}` }, run.name || `${run.mode}-${run.id.slice(0, 6)}`), 'text'],
  ['state', run => run.state, 'text'], ['mode', run => run.mode, 'text'], ['task', run => run.work, 'text'],
  ['started', run => WHEN.format(run.started_at * 1000), 'text'],
  ['workers', run => whole(run.num_workers || 0)], ['step', run => run.steps ? `${whole(run.step || 0)} / ${whole(run.steps)}` : whole(run.step || 0)],
  ['time', run => duration(run.elapsed_s)], ['loss', run => shortNumber(run.loss)],
  ['metrics', run => Object.entries(run.metrics || {}).map(([name, value]) => `${name} ${shortNumber(value)}`).join(', '), 'text'],
  ['traffic', run => run.num_bytes === null ? '–' : size(run.num_bytes)], ['ended by', run => run.ended_by || '', 'text why'],
];
let runs = [];
let turn = 0; // counts calls of show

const row = run => make('tr', { 'data-run': run.id }, ...COLUMNS.map(([, , kind]) => make('td', kind ? { class: kind } : {})));
function fill(node, run) { COLUMNS.forEach(([, cell], at) => { const value = cell(run); if (!(value instanceof Element)) say(node.cells[at], value); else if (node.cells[at].textContent !== value.textContent) node.cells[at].replaceChildren(value); }); }

function show() {
  const wanted = $('filter').value.trim().toLowerCase();
  const found = runs.filter(run => !wanted || [run.id, run.name, run.mode, run.work, run.state].some(text => String(text || '').toLowerCase().includes(wanted)));
  const table = $('runs');
  if (!table.tHead.rows.length) table.tHead.append(make('tr', {}, ...COLUMNS.map(([name, , kind]) => make('th', { scope: 'col', class: kind || '' }, name))));
  const body = table.tBodies[0], first = body.rows.length ? MAX_SHOWN : FIRST, mine = ++turn;
  const of = new Map(found.slice(0, MAX_SHOWN).map(run => [run.id, run])), keys = [...of.keys()];
  const put = count => inPlace(body, keys.slice(0, count), id => row(of.get(id)), (node, id) => fill(node, of.get(id)));
  put(first);
  if (found.length > first) requestAnimationFrame(() => setTimeout(() => { if (mine === turn) put(MAX_SHOWN); }));
  say($('count'), `${whole(found.length)} of ${whole(runs.length)} runs${found.length > MAX_SHOWN ? `, the newest ${MAX_SHOWN} are shown` : ''}`);
}

async function load() {
  try { runs = await fetch('/api/runs').then(reply => reply.json()); show(); } catch { $('count').textContent = 'no reply; trying again'; }
  setTimeout(load, runs.some(run => ['running', 'live'].includes(run.state)) ? 3000 : 15000);
}
$('filter').addEventListener('input', show);
load();
