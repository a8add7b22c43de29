/** Colours of charts. They are those of the page, which can be told apart with colour-blind eyes. */
import { dark } from './state.js';

/** Read from the style sheet once for each theme. */
let read = { theme: null, values: {} };

/** The value of a custom property of the page, for canvases. */
export function colour(name) {
  if (read.theme !== dark.peek()) read = { theme: dark.peek(), values: {} };
  if (!(name in read.values)) {
    read.values[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }
  return read.values[name];
}

/** The colour of a series by its number. */
export function seriesColour(index) {
  return colour(`series-${(index % 6) + 1}`);
}

/** Lines differ by pattern too. */
export const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3], [1, 2], [8, 2]];

/** The colour of a mark by its kind. */
export function markColour(kind) {
  if (kind === 'left') return colour('critical');
  if (kind === 'joined') return colour('good');
  return kind === 'drain' ? colour('warning') : colour('muted');
}

/** Hatches a rectangle: there is no data. */
export function hatch(context, left, top, width, height, scale = 1) {
  if (width <= 0) return;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = colour('hatch');
  context.lineWidth = scale;
  const step = 6 * scale;
  context.beginPath();
  for (let x = left - height; x < left + width; x += step) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
}
