// The dashboard of one run. It gets the whole once, then pushed ticks; after a break the whole again.
import { $, clock, duration, shortNumber, inPlace, make, price, say, size, whole, written } from './text.js';
import { modeVar } from './palette.js';
import { balance } from './charts.js';
import { remadeCharts, showCharts } from './runcharts.js';
import { showWorkers } from './workers.js';
import { addSpans } from './stream.js';
import { showWaits } from './waits.js';
import { showControls } from './controls.js';

const run = new URLSearchParams(location.search).get('run') || 'live';
let state = null, mayControl = false, isOver = false, metrics = { run: [], worker: [], curves: [] };

function connection(name, text) { $('connection').dataset.state = name; $('connection').textContent = text; }

// `metrics`: what /api/metrics says of the run's metrics; each has the server's label, unit and help.
function showMetrics(tick) {
  const { status } = tick, found = { mode: status.mode }, help = {};
  for (const metric of metrics.run) { found[metric.label] = written(metric, status[metric.name]); help[metric.label] = metric.help; }
  if (status.steps) found.step += ` / ${whole(status.steps)}`;
  if (tick.is_over) found.workers = whole(Math.max(status.num_workers, status.workers.length + status.left_out));
  found['time left'] = tick.is_over ? '–' : duration(status.eta_s);
  if (tick.cost) { found.cost = `${price(tick.cost.total)} ${tick.cost.currency}`; found['for waiting'] = price(tick.cost.waiting); }
  if (tick.cost && tick.cost.per_epoch !== null) found['an epoch'] = price(tick.cost.per_epoch);
  for (const [name, value] of Object.entries(tick.final)) found[`final ${name}`] = shortNumber(value);
  inPlace($('metrics'), Object.keys(found), name => make('div', { 'data-metric': name, title: help[name] || '' }, make('dt', {}, name), make('dd')), (node, name) => say(node.lastChild, found[name]));
  balance($('metrics'), innerWidth < 480 ? 84 : 112);
  $('progress').value = status.steps ? status.step / status.steps : 0;
  $('progress').hidden = !status.steps;
  say($('waiting'), status.waiting ? `everyone waits for: ${status.waiting}` : '');
  $('title').style.setProperty('--of-mode', modeVar(status.mode));
  document.title = `${status.steps ? `${Math.floor(100 * status.step / status.steps)} % ` : ''}${status.mode} – paramserver`;
}

function showRest(tick) {
  const { status } = tick;
  const more = [['newest snapshot', tick.durable_version === null ? 'none' : `version ${whole(tick.durable_version)}`]], kept = [...state.snapshots].reverse();
  if (status.versions && status.versions.length) more.push(['shards', status.versions.map((version, at) => `${at}: version ${whole(version)}, ${size(status.shard_bytes[at] || 0)}`).join('; ')]);
  if (state.about.lr_scale !== 1) more.push(['learning rate', `${shortNumber(state.about.lr_scale)} times the worker’s`]);
  more.push(['run', state.about.run], ['start of the server', `${state.about.server_incarnation}`], ['task', state.about.task || 'a script']);
  const said = new Map(more);
  inPlace($('more'), more.map(([name]) => name), name => make('div', {}, make('dt', {}, name), make('dd')), (node, name) => say(node.lastChild, said.get(name)));
  $('snapshots').hidden = !kept.length;
  const of = new Map(kept.map(item => [`${item.version}`, item]));
  inPlace($('snapshots').tBodies[0], [...of.keys()], version => { const item = of.get(version); return make('tr', {}, make('td', {}, whole(item.version)), make('td', {}, clock(item.at)), make('td', { class: 'text' }, item.path)); });
  const happened = [...state.events].reverse().slice(0, 200), times = new Map();
  const events = new Map(happened.reverse().map(event => { const key = `${event.at} ${event.text}`, again = times.get(key) || 0; times.set(key, again + 1); return [`${key} ${again}`, event]; }));
  inPlace($('events'), [...events.keys()].reverse(), key => { const event = events.get(key); return make('li', { 'data-kind': event.kind }, make('time', { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)), event.text); });
}

function show(tick, isWhole, spans) {
  showMetrics(tick); showWorkers(tick, metrics.worker, run, true); showCharts(state, metrics.curves); showWaits(tick.waits, tick.status.workers); showRest(tick);
  addSpans(spans, tick.clock_s, isWhole);
}

function addRow(tick) {
  const { status } = tick;
  if (status.workers.length || status.step) {
    for (const name of Object.keys(status.recorded || {})) state.series[`recorded.${name}`] ||= state.series.step.map(() => null);
    for (const [name, values] of Object.entries(state.series)) values.push((name.startsWith('recorded.') ? status.recorded?.[name.slice(9)] : status[name]) ?? null);
  }
  if (state.series.step.length >= 4000) for (const name of Object.keys(state.series)) state.series[name] = state.series[name].filter((_, at) => at % 2 === 0);
}

function gotWhole(event) {
  state = JSON.parse(event.data);
  connection('live', 'live');
  $('title').textContent = [state.about.task, state.about.label || state.about.mode].filter(Boolean).join(' · ') || 'paramserver';
  $('title').title = $('title').textContent;
  $('program').textContent = `paramserver ${state.about.version}`;
  $('settings').textContent = JSON.stringify(state.about.settings, null, 2);
  const port = state.about.settings.launch?.serve; // of the ps-serve that ps-launch started on this host
  $('try').hidden = !port;
  if (port) $('try').href = `${location.protocol}//${location.hostname}:${port}/`;
  showControls(state.about, mayControl);
  if (state.newest) show(state.newest, true, state.spans);
}

function gotTick(event) {
  const tick = JSON.parse(event.data);
  if (!state) return;
  connection('live', 'live');
  state.newest = tick;
  state.events = [...state.events, ...tick.events].slice(-300);
  state.evaluations.push(...tick.evaluations);
  for (const snapshot of tick.snapshots) state.snapshots = [...state.snapshots.filter(other => other.version !== snapshot.version), snapshot];
  state.snapshots = state.snapshots.slice(-Math.min(100, state.about.settings.checkpoint?.keep || 100));
  addRow(tick);
  show(tick, false, tick.spans);
}

async function connect() {
  const ask = (path, otherwise) => fetch(path).then(reply => reply.json()).catch(() => otherwise);
  [mayControl, metrics] = await Promise.all([ask('/api/session', {}).then(session => !!session.may_control), ask('/api/metrics', metrics)]);
  const source = new EventSource(`/api/events?run=${encodeURIComponent(run)}`);
  source.addEventListener('whole', gotWhole);
  source.addEventListener('tick', gotTick);
  source.addEventListener('over', () => { isOver = true; source.close(); connection('over', 'the run is over'); retry(); });
  source.onerror = () => {
    if (isOver) return;
    connection('lost', 'connection lost, trying again');
    if (source.readyState === EventSource.CLOSED) retry(); // it gives up where the reply is no stream
  };
}
// A restarted server, or the next run, has the same address.
function retry() { setTimeout(() => fetch(`/api/runs/${encodeURIComponent(run)}/status`).then(reply => { if (!reply.ok) throw reply; return reply.json(); }).then(tick => { if (tick && tick.is_over) throw tick; isOver = false; connect(); }).catch(retry), 1000); }

const again = () => { if (state?.newest) { showCharts(state, metrics.curves); addSpans([], state.newest.clock_s, false); } };
remadeCharts(again);
addEventListener('resize', again);
document.addEventListener('click', event => { for (const menu of document.querySelectorAll('.menu[open]')) if (!menu.contains(event.target)) menu.open = false; });
document.addEventListener('keydown', event => { const menu = event.key === 'Escape' && event.target.closest?.('.menu[open]'); if (menu) { menu.open = false; menu.firstElementChild.focus(); } });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
connect();
