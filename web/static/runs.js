// The list of runs: columns to choose, sort and filter; runs to tag and to select for a comparison.
// Runs in progress are read again every few seconds.
import { $, inPlace, make, say, whole } from './text.js';
import { read, write } from './address.js';
import { DEFAULTS, columnsOf, displayed, labelOf, resolved } from './columns.js';
import { fits, parse } from './query.js';
const PAGE = 200;
const FIRST = 40; // more than a window shows; the others follow after the first paint
const MAX_COMPARED = 40;

const state = read();
let runs = [], metrics = { recorded: [], is_up: {} }, settings = {}, columns = new Map(), known = [];
let most = PAGE, turn = 0, tableKey = '', mayControl = false, areRead = false, areSettingsRead = null, storeProblem = '';
let compare = null; // the module, once runs are selected
const cells = new WeakMap(); // the text of each row's cells, to change only what differs

const changed = () => { write(state); show(); };

// ---- which runs, and in which order ---------------------------------------------------------------------

const neededNames = () => [...parse(state.q).filter(term => term.key).map(term => term.key), state.sort.replace(/^-/, ''), ...state.cols];
function readSettings() {
  areSettingsRead ||= fetch('/api/settings').then(reply => reply.json()).then(found => { settings = found; remake(); show(); }).catch(() => { areSettingsRead = null; });
}
function remake() { columns = columnsOf(runs, metrics, settings, tag => { state.q = `${state.q} tag=${tag}`.trim(); $('filter').value = state.q; changed(); }); }

function valueOf(run, name) {
  const column = resolved(name, columns);
  return column ? (column.list || column.value)(run) : null;
}
function found() {
  const terms = parse(state.q);
  return runs.filter(run => fits(terms, [run.id, labelOf(run), run.mode, run.work, run.state, run.note, ...(run.tags || [])].map(text => String(text || '').toLowerCase()), name => valueOf(run, name)));
}
function sorted(some) {
  const isDown = state.sort.startsWith('-'), column = resolved(state.sort.replace(/^-/, ''), columns) || columns.get('started_at'), sign = isDown ? -1 : 1;
  const isEmpty = value => value === null || value === undefined || value === '' || Number.isNaN(value);
  const collator = new Intl.Collator('en', { numeric: true });
  return some.map(run => [column.value(run), run]).sort(([a], [b]) => isEmpty(a) || isEmpty(b) ? isEmpty(a) - isEmpty(b) : sign * (typeof a === 'number' && typeof b === 'number' ? a - b : collator.compare(String(a), String(b)))).map(([, run]) => run);
}

// ---- the table --------------------------------------------------------------------------------------------

function head(shown) {
  const all = make('input', { type: 'checkbox', id: 'select-all', 'aria-label': 'select all runs in the table' });
  all.addEventListener('change', () => { const ids = known.slice(0, most).map(run => run.id); state.sel = all.checked ? [...new Set([...state.sel, ...ids])] : state.sel.filter(id => !ids.includes(id)); changed(); });
  return make('tr', {}, make('th', { scope: 'col' }, all), ...shown.map(column => {
    const button = make('button', { type: 'button', title: column.help || '', 'data-column': column.key }, column.label);
    button.addEventListener('click', () => { const isText = (column.kind || '').startsWith('text'); state.sort = state.sort === column.key ? `-${column.key}` : state.sort === `-${column.key}` ? column.key : isText ? column.key : (metrics.is_up[column.key] ? `-${column.key}` : column.key); changed(); });
    return make('th', { scope: 'col', class: column.kind || '' }, button);
  }));
}
function row(run, shown) {
  const box = make('input', { type: 'checkbox', 'aria-label': `compare ${labelOf(run)}` });
  box.addEventListener('change', () => { state.sel = box.checked ? [...state.sel, run.id] : state.sel.filter(id => id !== run.id); changed(); });
  const node = make('tr', { 'data-run': run.id }, make('td', {}, box), ...shown.map(column => make('td', column.kind ? { class: column.kind } : {})));
  cells.set(node, []);
  return node;
}
function fill(node, run, shown) {
  const texts = cells.get(node), isSelected = state.sel.includes(run.id);
  shown.forEach((column, at) => {
    const value = column.cell(run), isNode = value instanceof Element, text = isNode ? value.outerHTML : String(value);
    if (texts[at] === text) return;
    texts[at] = text;
    if (isNode) node.cells[at + 1].replaceChildren(value); else say(node.cells[at + 1], value);
  });
  node.cells[0].firstChild.checked = isSelected;
  node.classList.toggle('selected', isSelected);
}

function show() {
  if (!areRead) return;
  if (neededNames().some(name => name !== 'eval.*' && !resolved(name, columns))) readSettings();
  known = sorted(found());
  const shown = displayed(state.cols, columns), table = $('runs'), key = JSON.stringify(shown.map(column => [column.key, column.label]));
  if (key !== tableKey) { tableKey = key; table.tHead.replaceChildren(head(shown)); table.tBodies[0].replaceChildren(); }
  for (const cell of table.tHead.rows[0].cells) {
    const name = cell.firstChild.dataset.column, isSorted = name && (resolved(state.sort.replace(/^-/, ''), columns)?.key === name);
    if (isSorted) cell.setAttribute('aria-sort', state.sort.startsWith('-') ? 'descending' : 'ascending'); else cell.removeAttribute('aria-sort');
  }
  const body = table.tBodies[0], first = body.rows.length ? most : FIRST, mine = ++turn, of = new Map(known.slice(0, most).map(run => [run.id, run])), ids = [...of.keys()];
  const put = count => inPlace(body, ids.slice(0, count), id => row(of.get(id), shown), (node, id) => fill(node, of.get(id), shown));
  put(first);
  if (known.length > first) requestAnimationFrame(() => setTimeout(() => { if (mine === turn) { put(most); compare?.paint(); } }));
  const picked = ids.filter(id => state.sel.includes(id)).length;
  $('select-all').checked = ids.length > 0 && picked === ids.length;
  $('select-all').indeterminate = picked > 0 && picked < ids.length;
  say($('count'), `${whole(known.length)} of ${whole(runs.length)} runs${state.sel.length ? `, ${state.sel.length} selected` : ''}`);
  $('more-runs').hidden = known.length <= most;
  say($('more-runs'), `Show ${whole(Math.min(PAGE, known.length - most))} more of ${whole(known.length - most)}`);
  showNotes();
  $('clear').hidden = !state.sel.length;
  $('tagging').hidden = !state.sel.length || !mayControl;
  showComparison();
}

function showNotes() {
  const names = new Set(runs.map(run => run.id)), gone = state.sel.filter(id => !names.has(id)), notes = [];
  if (gone.length) notes.push(`${gone.length === 1 ? 'A run' : `${gone.length} runs`} of this address ${gone.length === 1 ? 'is' : 'are'} gone (${gone.slice(0, 5).map(id => id.slice(0, 12)).join(', ')}${gone.length > 5 ? ', …' : ''}): deleted, or in another run store.`);
  const unknown = parse(state.q).filter(term => term.key && !resolved(term.key, columns)).map(term => term.key);
  if (unknown.length && (!areSettingsRead || Object.keys(settings).length || !runs.length)) notes.push(`No run has ${[...new Set(unknown)].join(', ')}: a term is a column or a setting with a value, such as mode=ssp, loss<0.3 or lr=0.1.`);
  if (storeProblem) notes.push(storeProblem);
  else if (!runs.length) notes.push('There are no runs yet. ps-launch and ps-server record each run in the run store.');
  inPlace($('notes'), notes, text => make('p', { class: 'warning' }, text));
}

// ---- the comparison -----------------------------------------------------------------------------------------

function showComparison() {
  const picked = state.sel.map(id => runs.find(run => run.id === id)).filter(Boolean), isOpen = picked.length > 0;
  $('board').classList.toggle('comparing', isOpen);
  $('comparison').hidden = !isOpen;
  if (!isOpen && !compare) return;
  const all = { picked: picked.slice(0, MAX_COMPARED), left: Math.max(0, picked.length - MAX_COMPARED), state, metrics, changed, load, results };
  if (compare) compare.compareRuns(all);
  else import('./compare.js').then(module => { if (!compare) { compare = module; showComparison(); } });
}
const load = run => fetch(`/api/runs/${encodeURIComponent(run.id)}/curves`).then(reply => reply.ok ? reply.json() : null).catch(() => null);

const results = groups => fetch(`/api/compare?runs=${groups.map(ids => ids.map(encodeURIComponent).join(',')).join(';')}`).then(reply => reply.ok ? reply.json() : null).catch(() => null);

// ---- columns and tags -----------------------------------------------------------------------------------------

function showColumns() {
  const groups = new Map();
  for (const column of columns.values()) groups.set(column.group, [...(groups.get(column.group) || []), column]);
  const chosen = new Set(displayed(state.cols, columns).map(column => column.key));
  const again = make('button', { type: 'button', class: 'small' }, 'As at first');
  again.addEventListener('click', () => { state.cols = [...DEFAULTS]; changed(); showColumns(); });
  const parts = [...groups].flatMap(([name, some]) => [make('h3', {}, name), ...some.map(column => {
    const box = make('input', { type: 'checkbox', value: column.key });
    box.checked = chosen.has(column.key);
    box.addEventListener('change', () => { const keys = displayed(state.cols, columns).map(shown => shown.key); state.cols = box.checked ? [...keys, column.key] : keys.filter(key => key !== column.key); changed(); });
    return make('label', { title: column.help || '' }, box, column.label);
  })]);
  $('columns').querySelector('.sheet').replaceChildren(again, ...parts);
}

async function tag(isAdding) {
  const names = $('tag-names').value.split(/[\s,]+/).filter(Boolean), failed = [];
  for (const run of runs.filter(item => state.sel.includes(item.id))) {
    const tags = isAdding ? [...new Set([...(run.tags || []), ...names])] : (run.tags || []).filter(name => !names.includes(name));
    const reply = await fetch(`/api/runs/${encodeURIComponent(run.id)}/tags`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ tags: tags.join(' ') }) });
    if (reply.ok) run.tags = tags; else failed.push(`${labelOf(run)}: ${(await reply.json()).error}`);
  }
  if (!failed.length) { $('tag-names').value = ''; $('tagging').open = false; }
  show();
  if (failed.length) $('notes').append(make('p', { class: 'warning' }, failed.join('; ')));
}

// ---- start ----------------------------------------------------------------------------------------------------

async function reload() {
  try {
    [runs, metrics] = await Promise.all([fetch('/api/runs').then(reply => reply.json()), metrics.recorded.length ? metrics : fetch('/api/metrics').then(reply => reply.json())]);
    areRead = true;
    remake(); show();
  } catch { $('count').textContent = 'no reply; trying again'; }
  setTimeout(reload, runs.some(run => ['running', 'live'].includes(run.state)) ? 3000 : 15000);
}

$('filter').value = state.q;
$('filter').addEventListener('input', () => { state.q = $('filter').value; most = PAGE; changed(); });
$('more-runs').addEventListener('click', () => { most += PAGE; show(); });
$('clear').addEventListener('click', () => { state.sel = []; changed(); $('filter').focus(); });
$('columns').addEventListener('toggle', () => { if ($('columns').open) { readSettings(); areSettingsRead?.then(showColumns); showColumns(); } });
$('tag-form').addEventListener('submit', event => { event.preventDefault(); tag(true); });
$('tag-remove').addEventListener('click', () => tag(false));
for (const menu of document.querySelectorAll('.menu')) {
  menu.addEventListener('keydown', event => { if (event.key === 'Escape') { menu.open = false; menu.firstElementChild.focus(); } });
  document.addEventListener('click', event => { if (!menu.contains(event.target)) menu.open = false; });
}
fetch('/api/session').then(reply => reply.json()).then(session => { mayControl = !!session.may_control; storeProblem = session.store_problem || ''; show(); }).catch(() => {});
reload();
