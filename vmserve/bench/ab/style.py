"""The report's style sheet: light, dark and on paper. Colours are Okabe and Ito's (2008)."""

__all__ = ["STYLE"]

STYLE = """
:root { --back:#ffffff; --text:#1c2024; --dim:#60646c; --rule:#e2e5e9; --panel:#f8f9fa;
  --c0:#0072b2; --c1:#d55e00; --c2:#009e73; --c3:#cc79a7; --c4:#8a6d00; --c5:#56b4e9;
  --good:#0a7a55; --bad:#b3411a; --free:#dfe3e8; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --back:#14171a; --text:#e8eaed; --dim:#9aa1aa;
  --rule:#2c3137; --panel:#1b1f24; --c0:#4aa8e0; --c1:#f08a4b; --c2:#3cc79b; --c3:#dc9dbf;
  --c4:#e0c341; --c5:#8fd0f5; --good:#3cc79b; --bad:#f08a4b; --free:#39414a; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--back); color:var(--text);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; margin: 8px 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 40px 0 6px; padding-top: 14px; border-top: 1px solid var(--rule); }
p { margin: 6px 0 10px; max-width: 82ch; } .facts { color: var(--dim); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr));
  gap: 16px; margin: 16px 0; }
figure { margin: 0; padding: 8px; background: var(--panel); border: 1px solid var(--rule);
  border-radius: 8px; break-inside: avoid; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .title { font-size: 13px; font-weight: 600; }
svg .tick, svg .axis { fill: var(--dim); } svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .one { stroke: var(--dim); stroke-dasharray: 4 3; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.line.c0,.dot.c0 { stroke:var(--c0) } .line.c1,.dot.c1 { stroke:var(--c1) }
.line.c2,.dot.c2 { stroke:var(--c2) } .line.c3,.dot.c3 { stroke:var(--c3) }
.line.c4,.dot.c4 { stroke:var(--c4) } .line.c5,.dot.c5 { stroke:var(--c5) }
.line.c1 { stroke-dasharray: 7 3 } .line.c2 { stroke-dasharray: 2 2 }
.line.c3 { stroke-dasharray: 9 3 2 3 } .line.c4 { stroke-dasharray: 4 4 }
svg .dot { fill: var(--back); stroke-width: 1.6; }
.key { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px;
  vertical-align:-1px; }
.key.c0 { background:var(--c0) } .key.c1 { background:var(--c1) } .key.c2 { background:var(--c2) }
.key.c3 { background:var(--c3) } .key.c4 { background:var(--c4) } .key.c5 { background:var(--c5) }
.s0 { fill:var(--c0); background:var(--c0) } .s1 { fill:var(--c1); background:var(--c1) }
.s2 { fill:var(--c4); background:var(--c4) } .s3 { fill:var(--c3); background:var(--c3) }
.s4 { fill:var(--free); background:var(--free) }
.legend { display:flex; flex-wrap:wrap; gap:4px 14px; padding:2px 8px 4px; color:var(--dim);
  font-size:12px; }
.interval { stroke-width:3; stroke-linecap:round } .neutral { stroke:var(--dim) }
svg .point.neutral, svg .arrow.neutral { fill:var(--dim) } svg .better { stroke:var(--good) }
svg .worse { stroke:var(--bad) } svg .point.better, svg .arrow.better { fill:var(--good) }
svg .point.worse, svg .arrow.worse { fill:var(--bad) } svg .arrow { stroke:none }
p .better, td .better { color:var(--good); font-weight:600 }
p .worse, td .worse { color:var(--bad); font-weight:600 } td .neutral { color:var(--dim) }
.scroll { overflow-x:auto; } table { border-collapse:collapse; margin:10px 0; font-size:13px;
  font-variant-numeric: tabular-nums; }
th, td { padding:4px 12px 4px 0; text-align:right; border-bottom:1px solid var(--rule);
  white-space:nowrap; } th { color:var(--dim); font-weight:600 }
th:first-child, td:first-child { text-align:left; }
summary { cursor:pointer; color:var(--dim); }
@media print { :root { --back:#fff; --text:#000; --dim:#444; --rule:#ccc; --panel:#fff;
  --c0:#0072b2; --c1:#d55e00; --c2:#009e73; --c3:#cc79a7; --c4:#8a6d00; --c5:#56b4e9;
  --good:#0a7a55; --bad:#b3411a; --free:#dfe3e8; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size:11px } main { max-width:none; padding:0 } h2 { break-after:avoid }
  .plots { grid-template-columns: 1fr 1fr; gap:8px } table { font-size:9px }
  th, td { padding:2px 8px 2px 0 } .scroll { overflow:visible } }
"""
