/** Workers over time: the batch as an area, requests that wait above it, KV fill as a strip, and marks where a worker came, went or changed. */
import { html, useEffect, useId, useLayoutEffect, useRef, useSignal, useState } from './library.js';
import { colour, hatch, markColour } from './colours.js';
import { columnAfter, drawnOrder } from './charts.js';
import { WorkerLink } from './parts.js';
import * as format from './format.js';
import { dark } from './state.js';

const LANE = 46;
const AXIS = 22;
const STRIP = 7;

function largest(workers) {
  let most = 1;
  for (const worker of workers) {
    worker.running.forEach((running, index) => {
      if (format.isNumber(running)) most = Math.max(most, running + (worker.waiting[index] || 0));
    });
  }
  return most;
}

/** Draws one lane with its top at `top`. */
function drawLane(context, worker, { top, width, most, answer }) {
  const step = width / answer.columns;
  const base = top + LANE - STRIP - 6;
  const room = LANE - STRIP - 12;
  for (let index = 0; index < answer.columns; index += 1) {
    const running = worker.running[index];
    const left = index * step;
    if (!format.isNumber(running)) continue;
    const waiting = worker.waiting[index] || 0;
    const height = (running / most) * room;
    const above = (waiting / most) * room;
    context.fillStyle = colour('series-1');
    context.fillRect(left, base - height, step + 0.4, height);
    context.fillStyle = colour('series-2');
    context.fillRect(left, base - height - above, step + 0.4, above);
    const used = worker.used[index];
    if (format.isNumber(used)) {
      context.globalAlpha = 0.12 + 0.88 * Math.min(1, used);
      context.fillStyle = colour(used > 0.95 ? 'critical' : 'series-3');
      context.fillRect(left, base + 2, step + 0.4, STRIP);
      context.globalAlpha = 1;
    }
  }
  drawMissing(context, worker, { top, step, columns: answer.columns });
  context.fillStyle = colour('grid');
  context.fillRect(0, top + LANE - 1, width, 1);
}

/** Hatches the columns without a report. */
function drawMissing(context, worker, { top, step, columns }) {
  for (let index = 0; index < columns; index += 1) {
    if (format.isNumber(worker.running[index])) continue;
    let last = index;
    while (last + 1 < columns && !format.isNumber(worker.running[last + 1])) last += 1;
    hatch(context, index * step, top + 3, (last - index + 1) * step, LANE - 7);
    index = last;
  }
}

function drawMark(context, mark, x, top) {
  context.fillStyle = markColour(mark.kind);
  context.fillRect(x - 0.75, top, 1.5, LANE - 1);
  context.beginPath();
  if (mark.kind === 'left') {
    context.rect(x - 4, top, 8, 8);
  } else {
    context.moveTo(x - 5, top);
    context.lineTo(x + 5, top);
    context.lineTo(x, top + 8);
  }
  context.fill();
}

function drawAxis(context, { width, top, answer }) {
  context.fillStyle = colour('surface');
  context.fillRect(0, top, width, AXIS);
  context.fillStyle = colour('muted');
  context.font = '11px system-ui, sans-serif';
  context.textBaseline = 'middle';
  const labels = Math.max(2, Math.floor(width / 110));
  for (let index = 0; index <= labels; index += 1) {
    const x = (index / labels) * width;
    context.textAlign = index === 0 ? 'left' : index === labels ? 'right' : 'center';
    context.fillText(format.time(answer.from_ms + (index / labels) * (answer.to_ms - answer.from_ms)), x, top + AXIS / 2);
    context.fillRect(Math.min(width - 1, x), top, 1, 3);
  }
}

/** Draws the lanes in sight. */
function draw(canvas, { answer, scroll, pointer }) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  const most = largest(answer.workers);
  const span = answer.to_ms - answer.from_ms;
  const first = Math.max(0, Math.floor(scroll / LANE));
  const last = Math.min(answer.workers.length, Math.ceil((scroll + height) / LANE));
  for (let index = first; index < last; index += 1) {
    const worker = answer.workers[index];
    const top = index * LANE - scroll;
    drawLane(context, worker, { top, width, most, answer });
    for (const mark of drawnOrder(worker.marks)) drawMark(context, mark, ((mark.time_ms - answer.from_ms) / span) * width, top);
  }
  drawAxis(context, { width, top: height - AXIS, answer });
  if (pointer) {
    context.fillStyle = colour('muted');
    context.fillRect(pointer.x, 0, 1, height - AXIS);
  }
}

/** The values under a pointer in words; "" beside the lanes. */
function textAt(answer, pointer) {
  const worker = answer.workers[pointer.lane];
  if (!worker) return '';
  const index = Math.min(answer.columns - 1, Math.floor(pointer.share * answer.columns));
  const running = worker.running[index];
  return format.isNumber(running)
    ? `${format.number(running)} running, ${format.number(worker.waiting[index])} waiting, KV ${format.percent(worker.used[index])}`
    : 'no report';
}

function timeAt(answer, share) {
  return answer.from_ms + share * (answer.to_ms - answer.from_ms);
}

/** What is under the pointer, in words. */
function Tip({ answer, pointer }) {
  if (!pointer) return html`<p class="lane-tip muted">Point at a lane to read its values, and click to go to that time; or move over them with the arrow keys, and press Enter.</p>`;
  const worker = answer.workers[pointer.lane];
  if (!worker) return html`<p class="lane-tip"></p>`;
  const time = timeAt(answer, pointer.share);
  const near = worker.marks.filter((mark) => Math.abs(mark.time_ms - time) < answer.step_ms * 2);
  return html`<p class="lane-tip"><strong>${worker.name}</strong> <span class="number">${format.time(time)}</span> ${textAt(answer, pointer)}${near.map((mark) => html` · <span class=${`mark-text mark-text-${mark.kind}`}>${mark.text}</span>`)}</p>`;
}

function Legend() {
  return html`<ul class="legend" aria-hidden="true">
    <li><span class="swatch swatch-1"></span>requests that run</li><li><span class="swatch swatch-2"></span>requests that wait</li>
    <li><span class="swatch swatch-3"></span>KV cache in use (darker is fuller)</li><li><span class="swatch swatch-hatch"></span>no report</li>
    <li><span class="mark mark-joined"></span>joined</li><li><span class="mark mark-left"></span>left</li><li><span class="mark mark-drain"></span>drain</li>
  </ul>`;
}

/** The workers whose lanes are in sight, or nearly, with their numbers. */
function inSight(workers, scroll, height) {
  const first = Math.max(0, Math.floor(scroll / LANE) - 4);
  const last = Math.ceil((scroll + (height || 560)) / LANE) + 4;
  return workers.slice(first, last).map((worker, index) => [worker, first + index]);
}

/** Scrolls so that a lane is in sight. */
function showLane(element, lane) {
  const room = element.clientHeight - AXIS - LANE;
  element.scrollTop = Math.max(Math.min(element.scrollTop, lane * LANE), lane * LANE - room);
}

/** The lanes of all workers; `onTime` is called with the time that is clicked, or chosen with the keyboard. */
export function Lanes({ answer, onTime }) {
  const canvas = useRef();
  const container = useRef();
  const [scroll, setScroll] = useState(0);
  const [pointer, setPointer] = useState(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  const theme = useSignal(dark);
  const id = useId();
  const total = answer.workers.length * LANE;
  useEffect(() => {
    const element = canvas.current;
    const watched = new ResizeObserver(() => setSize({ width: element.clientWidth, height: element.clientHeight }));
    watched.observe(element);
    return () => watched.disconnect();
  }, []);
  useLayoutEffect(() => draw(canvas.current, { answer, scroll, pointer }), [answer, scroll, pointer, size, theme]);
  const moved = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const x = event.clientX - box.left;
    const share = Math.max(0, Math.min(1, x / box.width));
    setPointer({ x, share, lane: Math.floor((event.clientY - box.top + scroll) / LANE) });
  };
  const clicked = () => {
    if (pointer) onTime(timeAt(answer, pointer.share));
  };
  const column = pointer ? Math.min(answer.columns - 1, Math.floor(pointer.share * answer.columns)) : null;
  const keyed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key] || 0;
    const wanted = down ? column ?? answer.columns - 1 : columnAfter(event.key, column, answer.columns);
    if (wanted !== null) {
      const lane = Math.max(0, Math.min(answer.workers.length - 1, (pointer?.lane ?? 0) + down));
      const share = (wanted + 0.5) / answer.columns;
      setPointer({ x: share * canvas.current.clientWidth, share, lane });
      showLane(container.current, lane);
    } else if (event.key === 'Enter' && pointer) clicked();
    else return;
    event.preventDefault();
  };
  const spoken = pointer && answer.workers[pointer.lane] ? `${answer.workers[pointer.lane].name}, ${format.time(timeAt(answer, pointer.share))}: ${textAt(answer, pointer)}` : 'no time chosen';
  const height = { height: `${Math.min(total + AXIS, 560)}px` };
  return html`<figure class="lanes" aria-label="Workers over time">
    <${Legend} />
    <div class="lanes-scroll" ref=${container} style=${height} onScroll=${(event) => setScroll(event.currentTarget.scrollTop)} role="region" aria-label="Lanes">
      <div class="lanes-content" style=${{ height: `${total + AXIS}px` }}>
        <ul class="lane-names">${inSight(answer.workers, scroll, size.height).map(([worker, index]) => html`<li key=${worker.name} style=${{ top: `${index * LANE}px` }}><${WorkerLink} name=${worker.name} /><span class="muted">${worker.role === 'both' ? worker.engine : `${worker.engine} · ${worker.role}`}</span></li>`)}</ul>
        <canvas ref=${canvas} class="lanes-canvas" style=${height} onMouseMove=${moved} onMouseLeave=${() => setPointer(null)} onClick=${clicked} onKeyDown=${keyed} onBlur=${() => setPointer(null)}
          tabindex="0" role="slider" aria-orientation="horizontal" aria-valuemin="0" aria-valuemax=${answer.columns - 1} aria-valuenow=${column ?? answer.columns - 1} aria-valuetext=${spoken} aria-describedby=${id}
          aria-label="Lanes, cursor: left and right move it in time, up and down to another worker, Enter goes to its time"></canvas>
        <p id=${id} class="visually-hidden">${`Batch, waiting requests and KV fill of ${answer.workers.length} workers from ${format.time(answer.from_ms)} to ${format.time(answer.to_ms)}; the table has the latest values, and the list below the marks.`}</p>
      </div>
    </div>
    <figcaption><${Tip} answer=${answer} pointer=${pointer} /></figcaption>
  </figure>`;
}
