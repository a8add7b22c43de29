/** What is wrong at the position, worst first. */
import { html } from './library.js';
import { Badge, Link, PositionLink, WorkerLink } from './parts.js';

const ORDER = { critical: 0, warning: 1, info: 2 };
const WORDS = { critical: 'Critical', warning: 'Warning', info: 'Note' };

function Finding({ finding }) {
  return html`<li class=${`finding finding-${finding.severity}`}>
    <div class="finding-title"><${Badge} kind=${finding.severity}>${WORDS[finding.severity] || finding.severity}<//><strong>${finding.title}</strong></div>
    <p>${finding.text}</p>
    ${finding.remedy ? html`<p class="remedy"><span class="remedy-label">What to do:</span> ${finding.remedy}</p>` : null}
    <p class="finding-links">
      ${finding.worker ? html`<span>Worker <${WorkerLink} name=${finding.worker} /></span>` : null}
      ${finding.request ? html`<span>Request <${Link} view="request" values=${{ id: finding.request }} className="code">${finding.request}<//></span>` : null}
      ${finding.position ? html`<span>Since position <${PositionLink} position=${finding.position} /></span>` : null}
    </p>
  </li>`;
}

/** The list of findings; says so when there is none. */
export function Findings({ findings }) {
  if (!findings.length) {
    return html`<div class="all-well"><span class="all-well-mark" aria-hidden="true"></span><div><strong>Nothing is wrong at this position.</strong><p class="muted">No worker is lost, no request waits for longer than others, and no limit is reached.</p></div></div>`;
  }
  const sorted = [...findings].sort((a, b) => (ORDER[a.severity] ?? 9) - (ORDER[b.severity] ?? 9));
  return html`<ul class="findings">${sorted.map((finding, index) => html`<${Finding} key=${`${finding.title} ${finding.worker} ${finding.request} ${index}`} finding=${finding} />`)}</ul>`;
}
