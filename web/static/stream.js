// A line for each worker with its last minute; the last line is the server's tensor work.
import { $, color, duration, share } from './text.js';
const WINDOW_S = 60, LEFT = 64, LEAST_ROW = 16, MOST_ROW = 30, FULL = 170; // pixels
const KINDS = [['wait_s', 'wait'], ['transfer_s', 'transfer'], ['compute_s', 'compute'], ['apply_s', 'apply']]; // in the order of a span
const MAX_DESCRIBED = 8; // workers in the label
let spans = [], hadSpans = false;

// A line as a phrase.
function describe(rank, from) {
  const mine = spans.filter(span => span.rank === rank && span.begin_s >= from), sum = kind => mine.reduce((all, span) => all + span[kind], 0);
  if (rank < 0) return `the server applied for ${duration(sum('apply_s'))}`;
  const parts = [['computing', sum('compute_s')], ['transfer', sum('transfer_s')], ['waiting', sum('wait_s')]], total = parts.reduce((all, part) => all + part[1], 0) || 1;
  return `worker ${rank}: ${parts.map(([name, part]) => `${name} ${share(part / total)}`).join(', ')}`;
}

// A line: in each pixel the shares of the kinds, one above the other. The server's is as high as it was busy.
function paintRow(paint, mine, isServer, from, scale, top, height) {
  const seconds = new Map(); // by pixel, of each kind
  for (const span of mine) {
    let at = span.begin_s;
    KINDS.forEach(([name], kind) => {
      const end = at + span[name];
      for (let pixel = Math.max(0, Math.floor((at - from) * scale)); pixel < (end - from) * scale; pixel++) {
        if (!seconds.has(pixel)) seconds.set(pixel, KINDS.map(() => 0));
        seconds.get(pixel)[kind] += Math.min(end, from + (pixel + 1) / scale) - Math.max(at, from + pixel / scale);
      }
      at = end;
    });
  }
  const fills = KINDS.map(([, name]) => color(name));
  for (const [pixel, parts] of seconds) {
    const all = isServer ? Math.max(1 / scale, parts.at(-1)) : parts.reduce((sum, part) => sum + part, 0);
    let bottom = top + height;
    for (const kind of [3, 2, 1, 0]) {
      const high = height * parts[kind] / all;
      if (high > 0) { paint.fillStyle = fills[kind]; paint.fillRect(LEFT + pixel, bottom - high, 1, high); }
      bottom -= high;
    }
  }
}

export function addSpans(more, now, isWhole) {
  spans = (isWhole ? [] : spans).concat(more).filter(span => span.begin_s > now - WINDOW_S - 30);
  $('stream').parentElement.hidden = !spans.length && !hadSpans; // a stored run has no last minute
  hadSpans ||= spans.length > 0;
  if (!hadSpans) return;
  const canvas = $('stream'), ranks = [...new Set(spans.map(span => span.rank))].sort((a, b) => (a < 0) - (b < 0) || a - b);
  const width = canvas.clientWidth || 300, ROW = Math.max(LEAST_ROW, Math.min(MOST_ROW, Math.floor(FULL / Math.max(1, ranks.length)))), height = Math.max(1, ranks.length) * ROW + 18, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`;
  }
  const paint = canvas.getContext('2d');
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.clearRect(0, 0, width, height);
  paint.font = `12px ${getComputedStyle(document.body).fontFamily}`; paint.textBaseline = 'middle';
  const from = Math.max(0, now - WINDOW_S), scale = (width - LEFT) / WINDOW_S, x = at => LEFT + (at - from) * scale;
  ranks.forEach((rank, row) => paintRow(paint, spans.filter(span => span.rank === rank), rank < 0, from, scale, row * ROW + 2, ROW - 4));
  canvas.setAttribute('aria-label', `The last minute. ${ranks.slice(0, MAX_DESCRIBED).map(rank => describe(rank, from)).join('; ')}${ranks.length > MAX_DESCRIBED ? `; and ${ranks.length - MAX_DESCRIBED} more: the table of workers has the shares` : ''}`);
  paint.fillStyle = color('dim');
  ranks.forEach((rank, at) => paint.fillText(rank < 0 ? 'server' : `worker ${rank}`, 0, at * ROW + ROW / 2));
  for (let second = Math.ceil(from / 10) * 10; second <= from + WINDOW_S; second += 10) paint.fillText(`${second} s`, x(second), height - 8);
}
