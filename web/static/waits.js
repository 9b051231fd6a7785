// Who waits for whom: an arrow from each waiting worker to those it waits for, and the same in sentences.
import { $, color, make, nameOf } from './text.js';
import { stateColor } from './palette.js';
const MAX_SHOWN = 24;

export function showWaits(waits, workers) {
  const ranks = workers.map(worker => worker.rank).slice(0, MAX_SHOWN), svg = $('waits');
  const state = new Map(workers.map(worker => [worker.rank, worker.state]));
  const region = new Map(workers.map(worker => [worker.rank, worker.region])), named = new Map(workers.map(worker => [worker.rank, nameOf(worker)]));
  const awaited = new Set(waits.flatMap(wait => wait.ranks));
  const width = Math.max(260, svg.clientWidth || 640), height = ranks.length > 8 ? 300 : 200, position = new Map();
  ranks.forEach((rank, at) => {
    const angle = 2 * Math.PI * at / Math.max(1, ranks.length) - Math.PI / 2;
    position.set(rank, [width / 2 + Math.cos(angle) * (width / 2 - 60), height / 2 + Math.sin(angle) * (height / 2 - 26)]);
  });
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  const head = make('defs', {}, make('marker', { id: 'head', viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: 'auto' }, make('path', { d: 'M0 0 8 4 0 8z', fill: color('dim') })));
  const lines = waits.flatMap(wait => wait.ranks.filter(rank => position.has(rank) && position.has(wait.rank)).map(rank => {
    const [x1, y1] = position.get(wait.rank), [x2, y2] = position.get(rank), long = Math.hypot(x2 - x1, y2 - y1) || 1, cut = 18 / long;
    return make('line', { x1: x1 + (x2 - x1) * cut, y1: y1 + (y2 - y1) * cut, x2: x2 - (x2 - x1) * cut, y2: y2 - (y2 - y1) * cut, stroke: color('dim'), 'stroke-width': 1.6, 'marker-end': 'url(#head)', 'data-from': wait.rank, 'data-to': rank });
  }));
  const nodes = ranks.flatMap(rank => {
    const [x, y] = position.get(rank), isWaiting = waits.some(wait => wait.rank === rank);
    return [make('circle', { cx: x, cy: y, r: 15, fill: isWaiting ? color('wait') : stateColor(state.get(rank)), stroke: awaited.has(rank) ? color('text') : 'none', 'stroke-width': 2 }),
      make('text', { x, y: y + 5, 'text-anchor': 'middle', 'font-size': 14, fill: isWaiting ? color('text') : '#fff' }, String(rank)),
      ...(region.get(rank) && region.get(rank) !== String(rank) ? [make('text', { x, y: y + 29, 'text-anchor': 'middle', 'font-size': 12, fill: color('dim') }, region.get(rank))] : [])];
  });
  svg.replaceChildren(head, ...lines, ...nodes);
  const said = new Map();
  for (const wait of waits) said.set(wait.why, [...(said.get(wait.why) || []), wait.rank]);
  const subject = those => those.some(rank => region.get(rank)) ? those.map(rank => named.get(rank)).join(', ') : `${those.length > 1 ? 'workers' : 'worker'} ${those.join(', ')}`;
  const sentences = [...said].slice(0, MAX_SHOWN).map(([why, those]) => make('li', {}, `${subject(those)}: ${why}`));
  $('waits-text').replaceChildren(...(sentences.length ? sentences : [make('li', {}, 'no worker waits')]));
}
