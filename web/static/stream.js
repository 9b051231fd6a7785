// A line for each worker with its last minute; the last line is the server's tensor work.
import { $, color, duration, share } from './text.js';
const WINDOW_S = 60, LEFT = 64, LEAST_ROW = 16, MOST_ROW = 30, FULL = 170; // pixels
const MAX_DESCRIBED = 8; // workers in the label
let spans = [], hadSpans = false;

// A line as a phrase.
function describe(rank, from) {
  const mine = spans.filter(span => span.rank === rank && span.begin_s >= from), sum = kind => mine.reduce((all, span) => all + span[kind], 0);
  if (rank < 0) return `the server applied for ${duration(sum('apply_s'))}`;
  const parts = [['computing', sum('compute_s')], ['transfer', sum('transfer_s')], ['waiting', sum('wait_s')]], total = parts.reduce((all, part) => all + part[1], 0) || 1;
  return `worker ${rank}: ${parts.map(([name, part]) => `${name} ${share(part / total)}`).join(', ')}`;
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
  const kinds = [['wait_s', color('wait')], ['transfer_s', color('transfer')], ['compute_s', color('compute')], ['apply_s', color('apply')]];
  for (const span of spans) {
    const y = ranks.indexOf(span.rank) * ROW;
    let at = span.begin_s;
    for (const [kind, fill] of kinds) {
      const end = at + span[kind];
      if (end > from && end > at) { paint.fillStyle = fill; paint.fillRect(Math.max(LEFT, x(at)), y + 2, Math.max(0.4, x(end) - Math.max(LEFT, x(at))), ROW - 4); }
      at = end;
    }
  }
  canvas.setAttribute('aria-label', `The last minute. ${ranks.slice(0, MAX_DESCRIBED).map(rank => describe(rank, from)).join('; ')}${ranks.length > MAX_DESCRIBED ? `; and ${ranks.length - MAX_DESCRIBED} more: the table of workers has the shares` : ''}`);
  paint.fillStyle = color('dim');
  ranks.forEach((rank, at) => paint.fillText(rank < 0 ? 'server' : `worker ${rank}`, 0, at * ROW + ROW / 2));
  for (let second = Math.ceil(from / 10) * 10; second <= from + WINDOW_S; second += 10) paint.fillText(`${second} s`, x(second), height - 8);
}
