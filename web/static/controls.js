// What may be asked of the run; the server decides, and its answer is shown as it is.
import { $, make } from './text.js';
const WORDS = {
  snapshot: ['Snapshot now', 'takes one at once'], drain: ['Drain', 'everyone’s next step is the last; weights are saved'],
  evict: ['Evict', 'ends this worker'], pause: ['Pause', 'this worker gets no reply until it is resumed'],
  resume: ['Resume', 'the worker goes on'], set: ['Set', ''],
};

async function ask(run, what) {
  const answer = $('answer');
  answer.className = ''; answer.textContent = 'asked';
  try {
    const response = await fetch(`/api/runs/${encodeURIComponent(run)}/controls`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(what) });
    const said = await response.json();
    answer.className = response.ok ? '' : 'bad';
    answer.textContent = response.ok ? said.done : [said.error, said.fix].filter(Boolean).join('; ');
  } catch (error) { answer.className = 'bad'; answer.textContent = `nobody answers: ${error.message}`; }
}

// Of what cannot be taken back.
function isSure(text, word) {
  $('sure-text').textContent = text; $('sure-yes').textContent = word;
  return new Promise(done => {
    const dialog = $('sure');
    dialog.onclose = () => done(dialog.returnValue === 'yes');
    $('sure-yes').onclick = () => dialog.close('yes');
    $('sure-no').onclick = () => dialog.close('no');
    dialog.returnValue = 'no';
    dialog.showModal();
    $('sure-no').focus();
  });
}
const SURE = { drain: () => 'Everyone’s next step is the last, and the run is over. Drain it?', evict: rank => `Worker ${rank} ends, and may not come back. Evict it?` };
async function askIfSure(run, what) {
  if (!SURE[what.do] || await isSure(SURE[what.do](what.rank), WORDS[what.do][0])) await ask(run, what);
}

let shown = '';
export function showControls(about, mayControl) {
  const known = about.controls || [];
  $('controls').hidden = !known.length;
  const key = JSON.stringify([about.run, known, mayControl]);
  if (!known.length || key === shown) return; // what somebody is typing stays
  shown = key;
  if (!mayControl) { $('buttons').replaceChildren(make('p', {}, 'This page may only look: open the address with ?token=… that the server printed.')); return; }
  const buttons = [], settings = known.filter(name => name.startsWith('set '));
  for (const name of known.filter(name => !name.startsWith('set '))) {
    const [word, what] = WORDS[name] || [name, ''];
    if (['evict', 'pause', 'resume'].includes(name)) {
      const rank = make('input', { type: 'number', min: 0, required: '', 'aria-label': `rank to ${name}`, placeholder: 'rank' });
      const form = make('form', {}, rank, make('button', { title: what }, word));
      form.addEventListener('submit', event => { event.preventDefault(); askIfSure(about.run, { do: name, rank: Number(rank.value) }); });
      buttons.push(form);
    } else {
      const button = make('button', { type: 'button', title: what }, word);
      button.addEventListener('click', () => askIfSure(about.run, { do: name }));
      buttons.push(button);
    }
  }
  if (settings.length) {
    const which = make('select', { 'aria-label': 'setting' }, ...settings.map(name => make('option', { value: name.slice(4) }, name.slice(4))));
    const value = make('input', { required: '', 'aria-label': 'new value', placeholder: 'value' });
    const form = make('form', {}, which, value, make('button', {}, 'Set'));
    form.addEventListener('submit', event => { event.preventDefault(); const text = value.value.trim(), number = Number(text); ask(about.run, { do: 'set', name: which.value, value: text === 'null' || text === 'none' ? null : Number.isNaN(number) ? text : number }); });
    buttons.push(form);
  }
  $('buttons').replaceChildren(...buttons);
}
