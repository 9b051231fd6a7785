// The controls of the run. The server decides, and its reply is shown unchanged.
import { $, make } from './text.js';
const WORDS = {
  snapshot: ['Snapshot now', 'takes one with the next commit'], drain: ['Drain', 'every worker’s next step is the last; weights are saved'],
  evict: ['Evict', 'ends this worker'], pause: ['Pause', 'this worker gets no reply until it is resumed'],
  resume: ['Resume', 'the worker goes on'], set: ['Set', ''],
};

async function send(run, command) {
  const reply = $('reply');
  reply.className = ''; reply.textContent = 'sent';
  try {
    const response = await fetch(`/api/runs/${encodeURIComponent(run)}/controls`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(command) });
    const body = await response.json();
    reply.className = response.ok ? '' : 'bad';
    reply.textContent = response.ok ? body.done : [body.error, body.fix].filter(Boolean).join('; ');
  } catch (error) { reply.className = 'bad'; reply.textContent = `no reply: ${error.message}`; }
}

// Ask before a control that cannot be undone.
function isConfirmed(text, word) {
  $('confirm-text').textContent = text; $('confirm-yes').textContent = word;
  return new Promise(done => {
    const dialog = $('confirm');
    dialog.onclose = () => done(dialog.returnValue === 'yes');
    $('confirm-yes').onclick = () => dialog.close('yes');
    $('confirm-no').onclick = () => dialog.close('no');
    dialog.returnValue = 'no';
    dialog.showModal();
    $('confirm-no').focus();
  });
}
const QUESTIONS = { drain: () => 'Every worker’s next step is the last, and the run ends. Drain it?', evict: rank => `Worker ${rank} ends, and may not come back. Evict it?` };
async function sendIfConfirmed(run, command) {
  const question = QUESTIONS[command.do];
  if (!question || await isConfirmed(question(command.rank), WORDS[command.do][0])) await send(run, command);
}

let displayed = '';
export function showControls(about, mayControl) {
  const known = about.controls || [];
  $('controls').hidden = !known.length;
  const key = JSON.stringify([about.run, known, mayControl]);
  if (!known.length || key === displayed) return; // keeps what the user is typing
  displayed = key;
  if (!mayControl) { $('buttons').replaceChildren(make('p', {}, 'This dashboard is read-only: open the address with ?token=… that the server printed.')); return; }
  const buttons = [], settings = known.filter(name => name.startsWith('set '));
  for (const name of known.filter(name => !name.startsWith('set '))) {
    const [word, title] = WORDS[name] || [name, ''];
    if (['evict', 'pause', 'resume'].includes(name)) {
      const rank = make('input', { type: 'number', min: 0, required: '', 'aria-label': `rank to ${name}`, placeholder: 'rank' });
      const form = make('form', {}, rank, make('button', { title }, word));
      form.addEventListener('submit', event => { event.preventDefault(); sendIfConfirmed(about.run, { do: name, rank: Number(rank.value) }); });
      buttons.push(form);
    } else {
      const button = make('button', { type: 'button', title }, word);
      button.addEventListener('click', () => sendIfConfirmed(about.run, { do: name }));
      buttons.push(button);
    }
  }
  if (settings.length) {
    const setting = make('select', { 'aria-label': 'setting' }, ...settings.map(name => make('option', { value: name.slice(4) }, name.slice(4))));
    const value = make('input', { required: '', 'aria-label': 'new value', placeholder: 'value' });
    const form = make('form', {}, setting, value, make('button', {}, 'Set'));
    form.addEventListener('submit', event => { event.preventDefault(); const text = value.value.trim(), number = Number(text); send(about.run, { do: 'set', name: setting.value, value: text === 'null' || text === 'none' ? null : Number.isNaN(number) ? text : number }); });
    buttons.push(form);
  }
  $('buttons').replaceChildren(...buttons);
}
