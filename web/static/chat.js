// A page to type into: text that streams, or the tensors of a model that writes no text.
import { $, duration, make, say } from './text.js';
const LOOK_MS = 1000;
let model = 'live', newest = null, before = null, running = [];

async function json(path, options) {
  const response = await fetch(path, options), found = await response.json();
  if (!response.ok) throw new Error(found.error?.message || found.error || response.statusText);
  return found;
}
const post = (path, body, signal) => fetch(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), signal });

function show(problem) {
  $('problem').hidden = !problem;
  say($('problem'), problem || '');
}

// The version that serves changes while people read: the head always names the newest one.
async function look() {
  try {
    const health = await json('/health');
    say($('state'), health.reason ? `${health.status}: ${health.reason}` : health.status);
    $('state').dataset.state = { ok: 'live', stale: 'stopped' }[health.status] || '';
    if (health.run !== undefined) {
      if (newest !== null && health.model !== newest) before = newest;
      newest = health.model;
      say($('version'), `${health.run}, version ${health.version}, ${duration(health.age_s)} old`);
    }
  } catch (error) {
    say($('state'), 'not reached');
    $('state').dataset.state = 'lost';
  }
  setTimeout(look, LOOK_MS);
}

function pane(title) {
  const badge = make('span', { class: 'pill tag' }), text = make('pre', { class: 'reply', tabindex: '0' });
  const head = make('div', { class: 'head' }, make('h2', {}, title), badge);
  $('replies').append(make('section', { class: 'card', 'aria-label': title }, head, text));
  return { text, badge };
}

async function stream(name, title, body, signal) {
  const { text, badge } = pane(title);
  text.append(make('b', {}, body.prompt));
  const response = await post('/v1/completions', { ...body, model: name, stream: true }, signal);
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split('\n\n');
    rest = lines.pop();
    for (const line of lines.filter(line => line !== 'data: [DONE]')) {
      const found = JSON.parse(line.slice('data: '.length));
      if (found.error) throw new Error(found.error.message);
      say(badge, found.system_fingerprint.replace(':', ', version '));
      text.append(found.choices[0].text);
    }
  }
}

async function ask() {
  stop();
  show('');
  $('replies').replaceChildren();
  const seed = $('seed').value, body = { prompt: $('prompt').value, temperature: Number($('temperature').value), max_tokens: Number($('tokens').value) };
  if (seed) body.seed = Number(seed);
  const names = $('beside').checked && before ? [[newest, 'Version now'], [before, 'Version before']] : [[model, 'Reply']];
  if ($('beside').checked && !before) show('There is no version before yet: a second one has not arrived.');
  const control = new AbortController();
  running.push(control);
  $('stop').disabled = false;
  try {
    await Promise.all(names.map(([name, title]) => stream(name, title, body, control.signal)));
  } catch (error) {
    if (error.name !== 'AbortError') show(error.message);
  }
  running = running.filter(other => other !== control);
  $('stop').disabled = !running.length;
}

function stop() {
  running.forEach(control => control.abort());
  running = [];
  $('stop').disabled = true;
}

async function infer() {
  show('');
  $('replies').replaceChildren();
  const inputs = [...$('inputs').querySelectorAll('label')].map(label => {
    const field = label.querySelector('textarea'), data = field.value.split(/[\s,]+/).filter(Boolean).map(Number);
    const each = JSON.parse(label.dataset.shape).slice(1), size = each.reduce((all, of) => all * of, 1);
    return { name: label.dataset.name, datatype: label.dataset.datatype, shape: [Math.max(1, Math.floor(data.length / size)), ...each], data };
  });
  try {
    const found = await json(`/v2/models/${model}/infer`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ inputs }) });
    for (const output of found.outputs) {
      const { text, badge } = pane(`${output.name} [${output.shape.join(', ')}]`);
      say(badge, `version ${found.model_version}`);
      text.textContent = output.data.map(value => (Number.isInteger(value) ? value : value.toFixed(4))).join('  ');
    }
  } catch (error) {
    show(error.message);
  }
}

function field(input) {
  const size = input.shape.slice(1).reduce((all, of) => all * of, 1);
  const area = make('textarea', { rows: '4', spellcheck: 'false', 'aria-label': input.name });
  area.value = Array(size).fill(0).join(' ');
  const label = make('label', { 'data-name': input.name, 'data-datatype': input.datatype, 'data-shape': JSON.stringify(input.shape) });
  label.append(`${input.name}, ${input.datatype} [${input.shape.join(', ')}]: ${size} numbers each`, area);
  return label;
}

async function begin() {
  look();
  try {
    const { data } = await json('/v1/models');
    model = data[0].id;
    const about = await json(`/v2/models/${model}`);
    say($('name'), `Try ${about.name}`);
    model = about.is_text ? 'live' : about.name;
    $('text').hidden = !about.is_text;
    $('tensors').hidden = about.is_text;
    $('inputs').replaceChildren(...about.inputs.map(field));
  } catch (error) {
    show(error.message);
  }
}

$('ask').addEventListener('submit', event => { event.preventDefault(); ask(); });
$('infer').addEventListener('submit', event => { event.preventDefault(); infer(); });
$('stop').addEventListener('click', stop);
$('temperature').addEventListener('input', () => say($('temperature-value'), $('temperature').value));
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') stop();
  if (event.key === 'Enter' && event.ctrlKey && !$('text').hidden) ask();
});
begin();
