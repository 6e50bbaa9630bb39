"""The style sheet of a report: light and dark, from a phone to a wide screen."""

STYLE = """
:root{--back:#fff;--card:#f4f6f9;--text:#17202c;--quiet:#56606e;--rule:#d5dbe3;--a:#1d5fd1;--b:#c2620a;--c:#0d8a72}
@media(prefers-color-scheme:dark){:root{--back:#12161c;--card:#1c222b;--text:#e6eaf0;--quiet:#9fa9b7;--rule:#343d4a;
--a:#78a8ff;--b:#f3a652;--c:#4cc9ae}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.4rem 0;max-width:48rem;overflow-wrap:anywhere}.quiet{color:var(--quiet);font-size:.85rem}
.problems{border-left:4px solid var(--b);background:var(--card);margin:1rem 0;padding:.6rem 1rem .6rem 2rem;
overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0}
.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.cards dt{color:var(--quiet);font-size:.8rem}.cards dd{margin:0;font-size:1.15rem;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(21rem,100%),1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:.5rem;padding:.7rem}
figcaption{font-size:.85rem;overflow-wrap:anywhere}figcaption i{display:inline-block;width:1rem;height:.25rem;
margin-right:.4rem;vertical-align:middle}
svg{display:block;width:100%;height:auto;margin-top:.4rem}svg text{fill:var(--quiet);font-size:11px}
.grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.8}
path.s0{stroke:var(--a)}path.s1{stroke:var(--b)}path.s2{stroke:var(--c)}
circle.s0{fill:var(--a)}circle.s1{fill:var(--b)}circle.s2{fill:var(--c)}
i.s0,.compute{background:var(--a)}i.s1,.waiting{background:var(--b)}i.s2,.reducing{background:var(--c)}
.legend span{margin-right:1rem}.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}
.bars{list-style:none;padding:0;margin:.5rem 0;max-height:26rem;overflow:auto}
.bars li{display:flex;align-items:center;gap:.6rem}.bars b{min-width:2.5rem;text-align:right;font-weight:400}
.bar{display:flex;flex:1;height:1rem;margin:.15rem 0}.bar i{height:100%}
.scroll{overflow:auto;max-height:32rem;border:1px solid var(--rule);border-radius:.5rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{position:sticky;top:0;background:var(--card);color:var(--quiet);font-weight:500}
tr:last-child td{border-bottom:0}
.pairs{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.3rem 1rem;margin:.5rem 0}
.pairs dt{color:var(--quiet)}.pairs dd{margin:0;overflow-wrap:anywhere;min-width:0}
@media(max-width:40rem){.pairs{display:block}.pairs dd{margin-bottom:.4rem}}
code{background:var(--card);padding:.1rem .3rem;border-radius:.25rem}
""".replace("\n", "")
