// The controls of the run: in the head, in each worker's row, and its settings. The server decides, and its reply is
// shown unchanged. Each control says its effect in a sentence.
import { $, make, say, shortNumber } from './text.js';
const CONTROLS = {
  snapshot: ['Snapshot now', 'Takes a snapshot with the next commit.'], drain: ['Drain', 'Every worker’s next step is the last; weights are saved, and the run ends.'],
  pause: ['Pause', 'The worker gets no reply until it is resumed; the mode decides whether others wait.'], resume: ['Resume', 'The worker goes on.'],
  evict: ['Evict', 'Ends the worker; it may not join again until the server restarts.'],
};
const OF_A_WORKER = ['pause', 'resume', 'evict'];
const SETTINGS = {
  lr_scale: ['Multiplies the server’s learning rate from the next commit on.', about => about.lr_scale],
  staleness: ['How many contributions a worker may be ahead of the slowest.', about => about.settings.policy?.staleness],
  mode: ['Changes the mode from the next commit on. Other modes need a restart from a snapshot.', about => about.mode],
  straggler_timeout_s: ['Seconds that a round waits for missing workers; it may close the open round.', about => about.settings.policy?.straggler_timeout_s],
};
const QUESTIONS = { drain: () => 'Every worker’s next step is the last, and the run ends. Drain it?', evict: rank => `Worker ${rank} ends, and may not come back. Evict it?` };
let about = null, mayControl = false, displayed = '';

async function send(command) {
  const reply = $('reply');
  reply.className = ''; reply.textContent = 'sent';
  try {
    const response = await fetch(`/api/runs/${encodeURIComponent(about.run)}/controls`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(command) });
    const body = await response.json();
    reply.className = response.ok ? '' : 'bad';
    reply.textContent = response.ok ? body.done : [body.error, body.fix].filter(Boolean).join('; ');
    return response.ok;
  } catch (error) { reply.className = 'bad'; reply.textContent = `no reply: ${error.message}`; return false; }
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
async function sendIfConfirmed(command) {
  const question = QUESTIONS[command.do];
  return (!question || await isConfirmed(question(command.rank), CONTROLS[command.do][0])) && send(command);
}

// A button whose effect is shown beside it while it is pointed at or has the focus.
function button(text, effect, options, act) {
  const node = make('button', { type: 'button', 'data-effect': effect, 'aria-description': effect, ...options }, text);
  if (act) node.addEventListener('click', act);
  return node;
}
function showHint(event) {
  const node = event.target.closest?.('[data-effect]');
  $('hint')?.remove();
  if (!node || !['pointerover', 'focusin'].includes(event.type)) return;
  const hint = make('div', { id: 'hint', 'aria-hidden': 'true' }, node.dataset.effect), box = node.getBoundingClientRect();
  document.body.append(hint);
  hint.style.left = `${Math.max(8, Math.min(box.left, innerWidth - hint.offsetWidth - 8))}px`;
  hint.style.top = `${box.bottom + 6 + hint.offsetHeight > innerHeight ? box.top - hint.offsetHeight - 6 : box.bottom + 6}px`;
}
for (const kind of ['pointerover', 'pointerout', 'focusin', 'focusout', 'click', 'scroll']) document.addEventListener(kind, showHint, { passive: true, capture: kind === 'scroll' });

// ---- of a worker --------------------------------------------------------------------------------------------

export const areOfWorkers = () => mayControl && OF_A_WORKER.some(name => (about?.controls || []).includes(name));
const paused = new Set(); // by this page, until the worker itself says that it waits
// The buttons in the row of a worker; `node` is what an earlier call returned.
export function rowControls(worker, node) {
  const isPaused = paused.has(worker.rank) || worker.waiting_for.startsWith('a resume'), known = about.controls || [];
  const cell = node || make('div', { class: 'rowtools' });
  const wanted = [isPaused ? 'resume' : 'pause', 'evict'].filter(name => known.includes(name));
  if (cell.dataset.has === wanted.join()) return cell;
  const hasFocus = cell.contains(document.activeElement);
  cell.dataset.has = wanted.join();
  cell.replaceChildren(...wanted.map(name => {
    const [word, effect] = CONTROLS[name];
    return button(word, effect, { class: `small plain${name === 'evict' ? ' danger' : ''}`, 'aria-label': `${word} worker ${worker.rank}` }, async () => {
      const isDone = await sendIfConfirmed({ do: name, rank: worker.rank });
      if (isDone && name === 'pause') paused.add(worker.rank);
      if (isDone && name === 'resume') paused.delete(worker.rank);
    });
  }));
  if (hasFocus) cell.firstChild?.focus();
  return cell;
}

// The same for a worker that is not in the table: one of many, or one that has left.
function byRank(known) {
  const rank = make('input', { type: 'number', min: 0, required: '', 'aria-label': 'rank of another worker', placeholder: 'rank' });
  const form = make('form', { class: 'tools' }, rank, ...known.map(name => button(CONTROLS[name][0], CONTROLS[name][1], { type: 'submit', value: name, 'aria-label': `${CONTROLS[name][0]} that worker` })));
  rank.style.width = '5rem';
  form.addEventListener('submit', event => { event.preventDefault(); sendIfConfirmed({ do: event.submitter?.value || known[0], rank: Number(rank.value) }); });
  const details = make('details', {}, make('summary', { class: 'note' }, 'Another worker'), form);
  form.style.marginTop = 'var(--space-2)';
  return details;
}

// ---- settings -------------------------------------------------------------------------------------------------

const current = name => { const value = SETTINGS[name]?.[1](about); return value === null || value === undefined ? 'none' : typeof value === 'number' && !Number.isInteger(value) ? shortNumber(value) : String(value); };
function settingsMenu(names) {
  const forms = names.map(name => {
    const value = make('input', { required: '', 'aria-label': `new value of ${name}`, placeholder: 'new value', autocomplete: 'off' });
    const form = make('form', { 'data-setting': name }, make('label', {}, make('span', {}, `${name}: `), make('b')), value, make('button', { 'aria-label': `Set ${name}` }, 'Set'), make('p', { class: 'note' }, SETTINGS[name]?.[0] || 'Counts from the next commit on.'));
    form.addEventListener('submit', event => { event.preventDefault(); const text = value.value.trim(), number = Number(text); send({ do: 'set', name, value: text === 'null' || text === 'none' ? null : Number.isNaN(number) ? text : number }); });
    return form;
  });
  const menu = make('details', { class: 'menu right', id: 'settings-menu' }, make('summary', {}, 'Settings'), make('div', { class: 'sheet settings' }, ...forms));
  menu.addEventListener('keydown', event => { if (event.key === 'Escape') { menu.open = false; menu.firstChild.focus(); } });
  return menu;
}

export function showControls(newAbout, isAllowed) {
  about = newAbout; mayControl = isAllowed;
  const known = about.controls || [], key = JSON.stringify([about.run, known, mayControl]);
  $('controls').hidden = !known.length;
  if (key !== displayed) { // else it keeps what the user is typing
    displayed = key;
    paused.clear();
    const ofWorkers = OF_A_WORKER.filter(name => known.includes(name)), settings = known.filter(name => name.startsWith('set ')).map(name => name.slice(4));
    const ofRun = known.filter(name => !name.startsWith('set ') && !OF_A_WORKER.includes(name));
    const readOnly = make('details', { class: 'menu right' }, make('summary', {}, 'Read-only'), make('div', { class: 'sheet' }, make('p', { class: 'note' }, 'This dashboard is read-only: open the address with ?token=… that the server printed.')));
    $('buttons').replaceChildren(...(!known.length ? [] : !mayControl ? [readOnly]
      : [...ofRun.map(name => button((CONTROLS[name] || [name])[0], (CONTROLS[name] || ['', ''])[1], name === 'drain' ? { class: 'danger' } : {}, () => sendIfConfirmed({ do: name }))), ...(settings.length ? [settingsMenu(settings)] : [])]));
    $('by-rank').replaceChildren(...(mayControl && ofWorkers.length ? [byRank(ofWorkers)] : []));
  }
  for (const form of document.querySelectorAll('#settings-menu form')) say(form.querySelector('b'), current(form.dataset.setting));
}
