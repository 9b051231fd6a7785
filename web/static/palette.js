// One color for each mode and each state of a worker, in every chart and table. style.css has the values.
import { color } from './text.js';
const STATES = { computing: 'compute', uploading: 'transfer', waiting: 'wait', joining: 'apply', away: 'warn', gone: 'bad', finished: 'dim' };
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const SHADES = [0, 0.3, -0.25, 0.5];

export const stateColor = state => color(STATES[state] || 'wait');
const nameOf = mode => `mode-${String(mode).replace(/[^a-z_]/g, '')}`;
// For styles, which the browser resolves itself.
export const stateVar = state => `var(--${STATES[state] || 'wait'})`;
export const modeVar = mode => `var(--${nameOf(mode)}, var(--mode-other))`;
export const modeColor = mode => color(nameOf(mode)) || color('mode-other');

function shaded(hex, amount) {
  const parts = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)), goal = amount > 0 ? 255 : 0;
  return `#${parts.map(part => Math.round(part + (goal - part) * Math.abs(amount)).toString(16).padStart(2, '0')).join('')}`;
}
// The strokes of curves: the mode gives the color; further curves of a mode have shades and dashes of it.
export function strokes(modes) {
  const seen = new Map();
  return modes.map(mode => {
    const nth = seen.get(mode) || 0;
    seen.set(mode, nth + 1);
    return { stroke: shaded(modeColor(mode), SHADES[nth % SHADES.length]), dash: DASHES[nth % DASHES.length] };
  });
}
export const faded = (hex, share) => `${hex}${Math.round(255 * share).toString(16).padStart(2, '0')}`;
