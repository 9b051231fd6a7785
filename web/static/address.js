// What the list of runs shows is in its address, so that a link shows somebody else the same.
import { DEFAULTS } from './columns.js';
const START = { q: '', sort: '-started_at', cols: DEFAULTS, sel: [], x: 'step', y: null, smooth: 0, log: '', seeds: true, hide: [] };
const LISTS = ['cols', 'sel', 'y', 'hide'];

export function read() {
  const asked = new URLSearchParams(location.search), state = structuredClone(START);
  for (const name of Object.keys(START)) {
    const text = asked.get(name);
    if (text === null) continue;
    if (LISTS.includes(name)) state[name] = text ? text.split(',') : [];
    else if (name === 'smooth') state[name] = Math.min(0.99, Math.max(0, Number(text) || 0));
    else if (name === 'seeds') state[name] = text !== '0';
    else state[name] = text;
  }
  return state;
}
export function write(state) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (!(name in START) || JSON.stringify(value) === JSON.stringify(START[name])) continue;
    asked.set(name, LISTS.includes(name) ? value.join(',') : name === 'seeds' ? (value ? '1' : '0') : String(value));
  }
  const text = asked.toString().replaceAll('%2C', ',');
  const path = `${location.pathname}${text ? `?${text}` : ''}`;
  if (path !== `${location.pathname}${location.search}`) history.replaceState(null, '', path);
}
