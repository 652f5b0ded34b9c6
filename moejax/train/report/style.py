"""The style sheet of a run's report: a calm page in light and dark, after the reader's setting."""

STYLE = """
:root {
  --page: #f6f5f1; --card: #fcfcfa; --ink: #1d1e22; --soft: #6a6c72; --rule: #e5e3dc;
  --a: #2b5fc2; --b: #c8561a; --c: #2f8265; --d: #8a4bb0; --shallow: #8fb1ea; --deep: #163a82;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131417; --card: #1b1c20; --ink: #e9e8e3; --soft: #999ba2; --rule: #2e3036;
    --a: #84aaff; --b: #ff9a5f; --c: #6fcfab; --d: #cb9af0; --shallow: #40629f; --deep: #b9d0ff;
  }
}
* { box-sizing: border-box; margin: 0; }
body {
  background: var(--page); color: var(--ink); padding: 56px 24px 72px;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1112px; margin: 0 auto; display: grid; gap: 20px; }
header { margin-bottom: 12px; }
.kicker { color: var(--soft); font-size: 13px; letter-spacing: .04em; }
h1 { font-size: 40px; line-height: 1.15; font-weight: 640; letter-spacing: -.022em; }
.lead { font-size: 19px; line-height: 1.5; max-width: 46em; margin-top: 12px; }
.meta { color: var(--soft); margin-top: 8px; }
.card, .tiles {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; min-width: 0;
}
.card { padding: 20px 24px; }
h2 { font-size: 16px; font-weight: 620; margin-bottom: 12px; }
h2 small { color: var(--soft); font-size: 13px; font-weight: 400; margin-left: 10px; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); overflow: hidden; gap: 1px; }
.tiles div { outline: 1px solid var(--rule); padding: 18px 24px 16px; }
.tiles dt, .tiles p { color: var(--soft); font-size: 13px; }
.tiles dd { font-size: 29px; line-height: 1.3; font-weight: 600; letter-spacing: -.02em; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 20px; }
svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
svg svg { display: inline; }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; opacity: .55; }
.tick, .note { font-size: 11.5px; fill: var(--soft); }
.note { fill: var(--ink); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.baseline { stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 5 4; opacity: .75; }
.curve { fill: none; stroke: var(--c); stroke-width: 1.75; stroke-linejoin: round; }
.curve.faint { stroke-width: 1; opacity: .3; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.frame { fill: none; stroke: var(--rule); }
image { image-rendering: pixelated; }
.on-dark { display: none; }
@media (prefers-color-scheme: dark) { .on-dark { display: inline; } .on-light { display: none; } }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 22px;
  font-size: 13px; color: var(--soft); margin-bottom: 10px; }
.legend li::before { content: ""; display: inline-block; width: 18px; height: 0; margin-right: 8px;
  border-top: 2.5px solid var(--c); vertical-align: middle; border-radius: 2px; }
.legend .faint::before { opacity: .35; }
.legend .points::before { width: 8px; height: 8px; border: 0; border-radius: 50%;
  background: var(--c); }
pre { font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30em; overflow: auto; }
details pre { white-space: pre; }
summary { font-size: 16px; font-weight: 620; cursor: pointer; }
details[open] summary { margin-bottom: 12px; }
table { border-collapse: collapse; font-size: 13.5px; }
.keys { width: 100%; }
th { font-weight: 400; color: var(--soft); text-align: left; }
.keys th { width: 42%; }
th, td { padding: 5px 16px 5px 0; border-top: 1px solid var(--rule); vertical-align: top; }
tr:first-child > * { border-top: 0; }
tbody tr:first-child > * { border-top: 1px solid var(--rule); }
.keys tbody tr:first-child > * { border-top: 0; }
td { overflow-wrap: anywhere; }
.figures { width: 100%; }
.figures td, .figures thead th:not(:first-child) { text-align: right; }
@media (max-width: 760px) {
  body { padding: 28px 14px; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: 1fr 1fr; }
  .card { padding: 16px; }
  .tiles div { padding: 14px 16px; }
  h1 { font-size: 30px; }
  .wide > svg { min-width: 720px; }
}
@media print { body { background: none; padding: 0; } .card, .tiles { break-inside: avoid; } }
"""
