/** Rates and latencies over time, with the log's events as marks. */
import { html, useSignal } from '../library.js';
import { useAnswer } from '../answers.js';
import { Chart, MarkList, markText } from '../charts.js';
import { goToTime } from '../moving.js';
import { Panel, PositionLink, Time, View, WindowSelect, windowLabel } from '../parts.js';
import * as format from '../format.js';
import * as state from '../state.js';

const CHARTS = [
  { title: 'Time to first token', unit: 'ms', unitLabel: 'milliseconds', names: [['ttft_p50_ms', 'p50'], ['ttft_p90_ms', 'p90'], ['ttft_p99_ms', 'p99']] },
  { title: 'Duration of requests', unit: 'ms', unitLabel: 'milliseconds', names: [['duration_p50_ms', 'p50'], ['duration_p99_ms', 'p99']] },
  { title: 'Requests', unit: '1/s', unitLabel: 'requests per second', names: [['requests_per_s', 'accepted']] },
  { title: 'Output', unit: '1/s', unitLabel: 'tokens per second', names: [['tokens_per_s', 'tokens']] },
  { title: 'Errors and migrations', unit: '1/s', unitLabel: 'requests per second', names: [['errors_per_s', 'failed'], ['migrations_per_s', 'migrated']] },
  { title: 'Waited in the router’s queue', unit: 'ms', unitLabel: 'milliseconds', names: [['queue_p99_ms', 'p99']] },
  { title: 'Cache hits', unit: 'share', unitLabel: 'share of prompt tokens', names: [['hit_rate', 'found by engines'], ['predicted_hit_rate', 'predicted by the router']] },
  { title: 'Found minus expected', unit: 'ms', unitLabel: 'time to first token, milliseconds, median', names: [['regret_ms', 'difference']], signed: true },
  { title: 'Requests in engines', unit: '', unitLabel: 'requests', names: [['running', 'running'], ['waiting', 'waiting']] },
  { title: 'KV cache in use', unit: 'share', unitLabel: 'share of blocks', names: [['kv_used', 'in use']] },
];

/** The view. */
export function Rates() {
  const position = useSignal(state.position);
  const seconds = useSignal(state.windowSeconds);
  const answer = useAnswer('series', position === null ? null : { at: position, window_s: seconds, columns: 120 });
  const data = answer.data;
  const subtitle = data && `${format.time(data.from_ms)} to ${format.time(data.to_ms)}; a point stands for ${format.duration(data.step_ms)}`;
  return html`<${View} title="Rates and latencies" subtitle=${subtitle} actions=${html`<${WindowSelect} />`} answer=${answer}>
    ${data && html`<p class="muted hint">Hatched time has no data. Click in a chart to go to that time.</p>
    <div class="charts">
      ${CHARTS.map((one) => html`<${Chart} key=${one.title} title=${one.title} unit=${one.unit} unitLabel=${one.unitLabel} signed=${one.signed} answer=${data} marks=${data.marks} onTime=${goToTime}
        series=${one.names.map(([name, label]) => ({ name, label }))} lists=${one.names.map(([name]) => data.series[name] || data.series.running.map(() => null))} />`)}
    </div>
    <${Panel} title="Log events in this window" note=${windowLabel(seconds)}>
      <${MarkList} marks=${[...data.marks].reverse()} render=${(mark) => html`<${Time} value=${mark.time_ms} /> ${markText(mark)} <${PositionLink} position=${mark.position} />`} />
    <//>`}
  <//>`;
}
