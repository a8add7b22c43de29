/** Lines over time. Every chart says its unit, shows missing data as missing, and has its values as a table. */
import uPlot from './vendor/uplot.js';
import { classes, html, useEffect, useId, useLayoutEffect, useRef, useSignal, useState } from './library.js';
import { DASHES, colour, hatch, markColour, seriesColour } from './colours.js';
import { PositionLink, SmallTable, Time } from './parts.js';
import { Table } from './table.js';
import * as format from './format.js';
import { dark } from './state.js';

/** All charts of the page show the cursor at the same time. */
const shared = uPlot.sync('headwater');

/** Times of the columns of an answer, in seconds: each stands at the end of its step. */
export function columnTimes(answer) {
  return Array.from({ length: answer.columns }, (_, index) => (answer.from_ms + (index + 1) * answer.step_ms) / 1000);
}

/** The column to which a key moves a cursor, from none to the last one; null for other keys. */
export function columnAfter(key, index, count) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
  if (key === 'Home') return 0;
  if (key === 'End') return count - 1;
  if (!(key in moves)) return null;
  return index === null ? count - 1 : Math.max(0, Math.min(count - 1, index + moves[key]));
}

/** Ranges of columns in which no series has a value. */
export function gaps(lists) {
  const found = [];
  const length = lists[0]?.length ?? 0;
  for (let index = 0; index < length; index += 1) {
    if (lists.some((values) => format.isNumber(values[index]))) continue;
    const latest = found[found.length - 1];
    if (latest && latest.last === index - 1) latest.last = index;
    else found.push({ first: index, last: index });
  }
  return found;
}

function drawGaps(plot) {
  const { left, top, width, height } = plot.bbox;
  const times = plot.data[0];
  const step = times.length > 1 ? times[1] - times[0] : 1;
  for (const gap of gaps(plot.data.slice(1))) {
    const from = Math.max(left, plot.valToPos(times[gap.first] - step, 'x', true));
    const to = Math.min(left + width, plot.valToPos(times[gap.last], 'x', true));
    hatch(plot.ctx, from, top, to - from, height, uPlot.pxRatio);
  }
}

function drawMarks(plot, marks) {
  const { left, top, width, height } = plot.bbox;
  const ratio = uPlot.pxRatio;
  plot.ctx.save();
  for (const mark of drawnOrder(marks)) {
    const x = Math.round(plot.valToPos(mark.time_ms / 1000, 'x', true));
    if (x < left || x > left + width) continue;
    plot.ctx.strokeStyle = plot.ctx.fillStyle = markColour(mark.kind);
    plot.ctx.lineWidth = ratio;
    plot.ctx.setLineDash([3 * ratio, 3 * ratio]);
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
    plot.ctx.beginPath();
    plot.ctx.moveTo(x - 4 * ratio, top);
    plot.ctx.lineTo(x + 4 * ratio, top);
    plot.ctx.lineTo(x, top + 6 * ratio);
    plot.ctx.fill();
  }
  plot.ctx.restore();
}

/** A label of the time axis: seconds only where they differ. */
function axisTime(seconds, step) {
  const text = format.time(seconds * 1000);
  return step >= 60 ? text.slice(0, 5) : text;
}

/** A label of the axis of values: the chart's title says the unit of rates and counts. */
function axisValue(value, unit) {
  return unit === 'ms' || unit === 'share' ? format.withUnit(value, unit) : format.compact(value);
}

/** The upper end of the axis: room above the largest value, and 1 for shares. */
function upperEnd(largest, unit) {
  if (unit === 'share') return Math.max(1, largest ?? 1);
  return largest > 0 ? largest * 1.08 : 1;
}

/** The lower end: zero, but for differences, which may be below it. */
function lowerEnd(least, signed) {
  return signed && least < 0 ? least * 1.08 : 0;
}

function plotOptions({ series, unit, width, height, holder, onIndex, small, signed }) {
  const axis = { stroke: colour('muted'), font: '11px system-ui, sans-serif', grid: { stroke: colour('grid'), width: 1 }, ticks: { stroke: colour('grid'), width: 1, size: 4 } };
  return {
    width,
    height,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: shared.key, setSeries: false }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
    scales: { x: { time: true, range: () => holder.range }, y: { range: (plot, least, largest) => [lowerEnd(least, signed), upperEnd(largest, unit)] } },
    axes: [
      { ...axis, space: 70, size: 28, values: (plot, seconds, number, space, step) => seconds.map((second) => axisTime(second, step)) },
      { ...axis, space: 28, size: small ? 48 : 58, values: (plot, values) => values.map((value) => axisValue(value, unit)) },
    ],
    series: [
      {},
      ...series.map((one, index) => ({
        label: one.label, stroke: seriesColour(one.colour ?? index), width: 1.5, dash: DASHES[index % DASHES.length], spanGaps: false,
        fill: series.length === 1 ? colour('fill-1') : undefined, points: { show: (plot, number) => isolated(plot.data[number]), size: 4 },
      })),
    ],
    hooks: {
      drawClear: [drawGaps],
      draw: [(plot) => drawMarks(plot, holder.marks)],
      setCursor: [(plot) => onIndex(plot.cursor.left >= 0 ? plot.cursor.idx : null)],
    },
  };
}

/** Whether all values stand alone, so that no line would be seen. */
function isolated(values) {
  return !values.some((value, index) => format.isNumber(value) && format.isNumber(values[index + 1]));
}

function lastKnown(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (format.isNumber(values[index])) return values[index];
  return null;
}

function Legend({ series, lists, unit, index, times, small }) {
  return html`<ul class="legend">
    ${series.map((one, number) => html`<li key=${one.name}>
      <span class=${`swatch swatch-${((one.colour ?? number) % 6) + 1} dash-${number}`} aria-hidden="true"></span>${one.label}
      <strong class="number">${format.withUnit(index === null ? lastKnown(lists[number]) : lists[number][index], unit)}</strong>
    </li>`)}
    ${index === null && small ? null : html`<li class="legend-time number">${index === null ? 'latest' : format.time(times[index] * 1000)}</li>`}
  </ul>`;
}

/** A table of about twenty of the values, for those who do not see the lines. */
function Values({ title, series, lists, unit, times }) {
  const [open, setOpen] = useState(false);
  const stride = Math.max(1, Math.ceil(times.length / 20));
  const indexes = times.map((_, index) => index).filter((index) => (times.length - 1 - index) % stride === 0);
  return html`<details class="values" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Values<span class="visually-hidden"> of ${title} as a table</span></summary>
    ${open
      ? html`<${SmallTable} label=${`Values of ${title}`} headings=${[['Time'], ...series.map((one) => [one.label, true])]}>
          ${indexes.map((index) => html`<tr key=${index}><td class="number">${format.time(times[index] * 1000)}</td>
            ${lists.map((values, number) => html`<td key=${number} class="right number">${format.isNumber(values[index]) ? format.withUnit(values[index], unit) : 'no data'}</td>`)}</tr>`)}
        <//>`
      : null}
  </details>`;
}

/** The values of all series at a column, in words. */
function valuesAt(index, { series, lists, unit, times }) {
  const values = series.map((one, number) => `${one.label} ${format.isNumber(lists[number][index]) ? format.withUnit(lists[number][index], unit) : 'no data'}`);
  return `${format.time(times[index] * 1000)}: ${values.join(', ')}`;
}

/** What the chart shows, in a sentence. */
function summary(title, series, lists, unit) {
  const parts = series.map((one, index) => {
    const values = lists[index].filter(format.isNumber);
    if (!values.length) return `${one.label}: no data`;
    const bounds = `${format.withUnit(Math.min(...values), unit)} to ${format.withUnit(Math.max(...values), unit)}`;
    return `${one.label}: ${bounds}, latest ${format.withUnit(values[values.length - 1], unit)}`;
  });
  return `${title}. ${parts.join('; ')}.`;
}

/**
 * A chart of an answer's series: `series` are {name, label, colour}, `answer` has from_ms, to_ms, step_ms, columns.
 * `onTime` is called with the time that is clicked, or chosen with the keyboard: arrows move the cursor, Enter goes to its time.
 */
export function Chart({ title, unit, unitLabel, series, answer, lists, marks = [], height = 150, onTime, small = false, signed = false }) {
  const holder = useRef({ range: [0, 1], marks: [], plot: null, cursor: null });
  const element = useRef();
  const theme = useSignal(dark);
  const [index, setIndex] = useState(null);
  const id = useId();
  const times = columnTimes(answer);
  const empty = lists.every((values) => !values.some(format.isNumber));
  holder.current.range = [answer.from_ms / 1000, answer.to_ms / 1000];
  holder.current.marks = marks;
  holder.current.onTime = onTime;

  useLayoutEffect(() => {
    const container = element.current;
    const width = Math.max(120, container.clientWidth);
    const plot = new uPlot(plotOptions({ series, unit, width, height, holder: holder.current, onIndex: setIndex, small, signed }), [times, ...lists], container);
    holder.current.plot = plot;
    plot.over.addEventListener('click', () => {
      if (plot.cursor.left >= 0) holder.current.onTime?.(plot.posToVal(plot.cursor.left, 'x') * 1000);
    });
    const resized = new ResizeObserver(() => plot.setSize({ width: Math.max(120, container.clientWidth), height }));
    resized.observe(container);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [theme, unit, series.map((one) => one.name).join()]);
  useEffect(() => {
    holder.current.plot?.setData([times, ...lists]);
    // The cursor of the keyboard stays at its time while the window moves on.
    if (holder.current.cursor !== null) place(Math.round((holder.current.cursor - times[0]) / (answer.step_ms / 1000)));
  }, [answer, lists]);

  const place = (wanted) => {
    const { plot } = holder.current;
    const column = wanted === null ? null : Math.max(0, Math.min(times.length - 1, wanted));
    holder.current.cursor = column === null ? null : times[column];
    plot?.setCursor(column === null ? { left: -10, top: -10 } : { left: plot.valToPos(times[column], 'x'), top: 0 });
    setIndex(column);
  };
  const keyed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const column = columnAfter(event.key, index, times.length);
    if (column !== null) place(column);
    else if (event.key === 'Enter' && index !== null) onTime(times[index] * 1000);
    else return;
    event.preventDefault();
  };
  // A chart whose times can be gone to is moved over like a slider; the picture itself is described beside it.
  const cursor = onTime && {
    role: 'slider', tabindex: 0, 'aria-label': `${title}, cursor: arrows move it, Enter goes to its time`, 'aria-describedby': `${id}-summary`, 'aria-orientation': 'horizontal',
    'aria-valuemin': 0, 'aria-valuemax': times.length - 1, 'aria-valuenow': index ?? times.length - 1, 'aria-valuetext': valuesAt(index ?? times.length - 1, { series, lists, unit, times }),
    onKeyDown: keyed, onBlur: () => holder.current.cursor !== null && place(null),
  };

  return html`<figure class=${classes('chart', onTime && 'chart-clickable')} aria-labelledby=${id}>
    <figcaption><span id=${id} class="chart-title">${title}</span> <span class="unit">${unitLabel}</span></figcaption>
    <div class="chart-area">
      <div ref=${element} ...${cursor || { role: 'img', 'aria-label': summary(title, series, lists, unit) }}></div>
      ${cursor ? html`<p id=${`${id}-summary`} class="visually-hidden">${summary(title, series, lists, unit)}</p>` : null}
      ${empty ? html`<p class="chart-empty">No data in this window</p>` : null}
    </div>
    <${Legend} series=${series} lists=${lists} unit=${unit} index=${index} times=${times} small=${small} />
    <${Values} title=${title} series=${series} lists=${lists} unit=${unit} times=${times} />
  </figure>`;
}

/** A mark in words: with its worker, which its text may leave out. */
export function markText(mark) {
  return mark.worker && !mark.text.includes(mark.worker) ? `${mark.worker} ${mark.text}` : mark.text;
}

/** Marks in the order in which they are drawn: a join is never hidden by the change that comes with it. */
export function drawnOrder(marks) {
  return [...marks].sort((a, b) => Number(a.kind !== 'changed') - Number(b.kind !== 'changed'));
}

const MARKS = [
  { name: 'time', label: 'Time', render: (mark) => html`<${Time} value=${mark.time_ms} precise=${true} />` },
  { name: 'mark', label: 'What happened', className: 'clip-long', render: (mark) => html`<span class=${`mark mark-${mark.kind}`} aria-hidden="true"></span> ${markText(mark)}` },
  { name: 'position', label: 'Position', align: 'right', render: (mark) => html`<${PositionLink} position=${mark.position} />` },
];

/** The log events of a window as a table, the latest first: what the marks of the charts say. */
export function MarkTable({ marks }) {
  if (!marks.length) return html`<p class="muted">No worker joined, left or changed in this window.</p>`;
  const rows = [...marks].sort((a, b) => b.position - a.position);
  return html`<${Table} label="Log events" columns=${MARKS} rows=${rows} keyOf=${(mark) => `${mark.position} ${mark.worker} ${mark.kind}`} />`;
}
