// The filter of the list of runs: words, and terms such as mode=ssp, loss<0.3, tag=baseline, lr!=0.1, -state=lost.
const TERM = /(-?)([a-z_][\w.]*)\s*(<=|>=|!=|=|<|>)\s*("[^"]*"|[^\s<>=!]\S*)|(-?)("[^"]+"|\S+)/gi;
const UNFINISHED = /^-?[a-z_][\w.]*(<=|>=|!=|=|<|>)$/i;
const FACTORS = { '%': 0.01, kb: 1e3, mb: 1e6, gb: 1e9, s: 1, min: 60, h: 3600 };

const bare = text => text.replace(/^"|"$/g, '').toLowerCase();
export function parse(text) {
  const terms = [];
  for (const [whole, minus, key, op, value, minusText, word] of text.matchAll(TERM)) {
    if (key) terms.push({ isNot: !!minus, key: key.toLowerCase(), op, value: bare(value) });
    else if (!UNFINISHED.test(whole)) terms.push({ isNot: !!minusText, text: bare(word) });
  }
  return terms;
}

export function numberOf(text) {
  const found = /^(-?[\d.]+(?:e[-+]?\d+)?)\s*(%|kb|mb|gb|s|min|h)?$/i.exec(text);
  return found ? Number(found[1]) * (found[2] ? FACTORS[found[2].toLowerCase()] : 1) : NaN;
}

function compared(known, op, value) {
  if (known === null || known === undefined || known === '') return op === '!=' || (op === '=' && ['null', 'none'].includes(value));
  const left = typeof known === 'number' ? known : numberOf(String(known)), right = numberOf(value);
  if (op === '<' || op === '<=' || op === '>' || op === '>=') {
    if (Number.isNaN(left) || Number.isNaN(right)) return false;
    return op === '<' ? left < right : op === '<=' ? left <= right : op === '>' ? left > right : left >= right;
  }
  const text = String(known).toLowerCase();
  const isSame = !Number.isNaN(left) && !Number.isNaN(right) ? left === right
    : value.includes('*') ? new RegExp(`^${value.split('*').map(part => part.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('.*')}$`).test(text) : text === value;
  return isSame === (op === '=');
}

// Whether a run fits all terms. `words`: its texts; `valueOf(key)`: a value, or a list of which one must fit.
export function fits(terms, words, valueOf) {
  return terms.every(term => {
    if (!term.key) return words.some(word => word.includes(term.text)) !== term.isNot;
    const known = valueOf(term.key), values = Array.isArray(known) ? (known.length ? known : [null]) : [known];
    const isFit = term.op === '!=' ? values.every(value => compared(value, term.op, term.value)) : values.some(value => compared(value, term.op, term.value));
    return isFit !== term.isNot;
  });
}
