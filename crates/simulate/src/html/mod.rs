//! The report as a self-contained HTML file. The charts are inline SVG, and the colours follow the
//! reader's light or dark mode.

mod curve;

use std::fmt::Write as _;

use self::curve::{Curves, Point, Series, round_top};
use crate::{
    frontier::Frontier,
    report::{RuleReport, SimulationReport, percent},
    sweep::{Axis, SweepReport, SweepValue},
    timeline::Timeline,
};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #fff;
  --ok: #5b8db8; --bad: #c4442f; --other: #8250df; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117; --ok: #5b9bd0; --bad: #f0705a; --other: #b083f0; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.warning { border-left: 4px solid var(--bad); padding-left: .6rem; }
code { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } .chart { overflow-x: auto; } svg text { fill: var(--soft); font-size: 12px; }
.ok { fill: var(--ok); } .bad { fill: var(--bad); } .axis { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; } .curve.c1 { stroke-dasharray: 6 3; } .curve.c2 { stroke-dasharray: 2 3; }
.curve.c0 { stroke: var(--bad); } .curve.c1 { stroke: var(--ok); } .curve.c2 { stroke: var(--other); }
.dot.c0 { fill: var(--bad); } .dot.c1 { fill: var(--ok); } .dot.c2 { fill: var(--other); }
@media (max-width: 45rem) {
  table { display: block; overflow-x: auto; } td, th { white-space: nowrap; } .chart svg { width: 44rem; }
}
";

/// The width of a chart, in pixels.
pub(crate) const WIDTH: u64 = 900;
/// The height of a chart, in pixels.
pub(crate) const HEIGHT: u64 = 220;
/// The left margin of a chart, for the labels of the vertical axis, in pixels.
pub(crate) const LEFT: u64 = 70;
/// The top margin of a chart, in pixels.
pub(crate) const TOP: u64 = 34;
/// The bottom margin of a chart, for the labels of the horizontal axis, in pixels.
pub(crate) const BOTTOM: u64 = 40;

/// Returns the report as an HTML document.
#[must_use]
pub fn as_html(report: &SimulationReport) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n",
    );
    let title = format!("Simulation of {}", escaped(&report.rules_file));
    let _ = write!(
        out,
        "<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    if report.interrupted {
        out.push_str("<p class=\"warning\">The simulation was interrupted: these are the results so far.</p>\n");
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "<p class=\"warning\">{}</p>", escaped(warning));
    }
    summary(&mut out, report);
    chart(&mut out, "Requests over time", &report.timeline);
    rules(&mut out, report);
    comparison(&mut out, report);
    sweep(&mut out, report);
    suggestions(&mut out, report);
    frontiers(&mut out, report);
    notes(&mut out, report);
    out.push_str("</body>\n</html>\n");
    out
}

fn summary(out: &mut String, report: &SimulationReport) {
    let (lines, requests) = (&report.lines, &report.requests);
    let span = match (lines.from_ms, lines.to_ms) {
        (Some(from), Some(to)) => format!(", {} to {}", date(from), date(to)),
        _ => String::new(),
    };
    let _ = writeln!(
        out,
        "<p>{} lines ({}){span}; {} damaged.<br>{} requests decided, {} denied ({}).</p>",
        lines.read,
        escaped(&lines.formats.join("; ")),
        lines.damaged,
        requests.decided,
        requests.denied,
        escaped(&percent(requests.denied, requests.decided))
    );
    for damaged in &lines.damaged_lines {
        let (file, problem) = (escaped(&damaged.file), escaped(&damaged.problem));
        let text = escaped(&damaged.text);
        let _ = writeln!(
            out,
            "<p>{file}, line {}: {problem}<br><code>{text}</code></p>",
            damaged.line
        );
    }
}

/// Draws a timeline's requests and denials as stacked bars.
fn chart(out: &mut String, title: &str, timeline: &Timeline) {
    let most = timeline.requests.iter().copied().max().unwrap_or(0);
    if most == 0 {
        return;
    }
    let title = escaped(title);
    let (plot_width, plot_height) = (WIDTH - LEFT, HEIGHT - TOP - BOTTOM);
    let bottom = TOP + plot_height;
    let _ = write!(
        out,
        "<h2>{title}</h2>\n<div class=\"chart\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>\n"
    );
    let unit = duration(timeline.interval_ms);
    let _ = writeln!(
        out,
        "<text x=\"0\" y=\"14\">requests per {unit}</text>\
         <rect class=\"ok\" x=\"{0}\" y=\"4\" width=\"12\" height=\"12\"/><text x=\"{1}\" y=\"14\">admitted</text>\
         <rect class=\"bad\" x=\"{2}\" y=\"4\" width=\"12\" height=\"12\"/><text x=\"{3}\" y=\"14\">denied</text>",
        LEFT + 200,
        LEFT + 218,
        LEFT + 300,
        LEFT + 318
    );
    // Positions are in tenths of a pixel, so that there is a gap between narrow bars.
    let count = (timeline.requests.len() as u64).max(1);
    let step = plot_width * 10 / count;
    let bar = step.saturating_sub(if step > 30 { 10 } else { 0 }).max(1);
    for (at, (requests, denied)) in timeline.requests.iter().zip(&timeline.denied).enumerate() {
        if *requests == 0 {
            continue;
        }
        let x = LEFT * 10 + step * at as u64;
        let height = |count: u64| (count * plot_height * 10).div_ceil(most);
        let (all, red) = (height(*requests), height(*denied));
        let at = date(timeline.start_ms + timeline.interval_ms * at as u64);
        let tenth = |tenths: u64| format!("{}.{}", tenths / 10, tenths % 10);
        let mut rect = |class: &str, top: u64, height: u64| {
            let _ = write!(
                out,
                "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{at}: requests {requests}, denied {denied}</title></rect>",
                tenth(x),
                tenth(bottom * 10 - top),
                tenth(bar),
                tenth(height)
            );
        };
        rect("ok", all, all - red.min(all));
        if *denied > 0 {
            rect("bad", red, red);
        }
    }
    let end = timeline.start_ms + timeline.interval_ms * count;
    let _ = write!(
        out,
        "\n<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{WIDTH}\" y2=\"{bottom}\"/>\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"{TOP}\" x2=\"{LEFT}\" y2=\"{bottom}\"/>\
         <text x=\"{0}\" y=\"{1}\" text-anchor=\"end\">{most}</text>\
         <text x=\"{0}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\
         <text x=\"{LEFT}\" y=\"{2}\">{3}</text>\
         <text x=\"{WIDTH}\" y=\"{2}\" text-anchor=\"end\">{4}</text>\
         <text x=\"{5}\" y=\"{2}\" text-anchor=\"middle\">time (UTC)</text>\n</svg></div>\n",
        LEFT - 6,
        TOP + 10,
        bottom + 18,
        date(timeline.start_ms),
        date(end),
        LEFT + plot_width / 2
    );
}

fn rules(out: &mut String, report: &SimulationReport) {
    out.push_str("<h2>Rules</h2>\n<table><tr><th>rule</th><th>mode</th><th class=\"n\">requests</th><th class=\"n\">denied</th><th class=\"n\">share</th><th class=\"n\">keys</th><th class=\"n\">keys denied</th></tr>\n");
    for rule in &report.rules {
        let name = escaped(&rule.rule);
        if !rule.simulated {
            let _ = writeln!(
                out,
                "<tr><td>{name}</td><td>{}</td><td colspan=\"5\">not simulated</td></tr>",
                rule.mode
            );
            continue;
        }
        let _ = writeln!(
            out,
            "<tr><td>{name}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            rule.mode,
            rule.requests,
            rule.denied,
            escaped(&percent(rule.denied, rule.requests)),
            rule.keys,
            rule.keys_denied
        );
    }
    out.push_str("</table>\n");
    for rule in report.rules.iter().filter(|rule| rule.denied > 0) {
        chart(
            out,
            &format!("Rule {}: requests over time", rule.rule),
            &rule.timeline,
        );
        worst(out, rule);
    }
}

fn worst(out: &mut String, rule: &RuleReport) {
    out.push_str(
        "<table><tr><th>key</th><th class=\"n\">denied</th><th>first</th><th>last</th></tr>\n",
    );
    for key in &rule.worst {
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td>{}</td><td>{}</td></tr>",
            key_text(&key.key),
            key.denied,
            date(key.first_ms),
            date(key.last_ms)
        );
    }
    out.push_str("</table>\n");
}

fn comparison(out: &mut String, report: &SimulationReport) {
    let Some(comparison) = &report.comparison else {
        return;
    };
    let _ = writeln!(
        out,
        "<h2>Compared with {}</h2>\n<p>Of {} requests, {} are newly denied ({}), and {} are no longer denied.</p>",
        escaped(&comparison.against),
        comparison.compared,
        comparison.newly_denied,
        escaped(&percent(comparison.newly_denied, comparison.compared)),
        comparison.no_longer_denied
    );
    for (title, keys) in [
        ("Newly denied", &comparison.newly),
        ("No longer denied", &comparison.no_longer),
    ] {
        if keys.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "<h3>{title}</h3>\n<table><tr><th>rule</th><th>key</th><th class=\"n\">requests</th><th>first</th><th>last</th></tr>"
        );
        for key in keys {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td><code>{}</code></td><td class=\"n\">{}</td><td>{}</td><td>{}</td></tr>",
                escaped(&key.rule),
                key_text(&key.key),
                key.requests,
                date(key.first_ms),
                date(key.last_ms)
            );
        }
        out.push_str("</table>\n");
    }
}

fn sweep(out: &mut String, report: &SimulationReport) {
    let Some(sweep) = &report.sweep else {
        return;
    };
    let title = format!("Denials of rule {} by its limit", sweep.rule);
    let _ = writeln!(out, "<h2>{}</h2>", escaped(&title));
    sweep_chart(out, &title, sweep);
    out.push_str("<table><tr><th>limit</th><th class=\"n\">denied</th><th class=\"n\">share</th><th class=\"n\">keys denied</th><th class=\"n\">share</th><th class=\"n\">all denied</th><th class=\"n\">share</th><th class=\"n\">all keys denied</th><th class=\"n\">share</th></tr>\n");
    for value in &sweep.values {
        let _ = write!(out, "<tr><td>{}</td>", escaped(&value.limit));
        for (part, whole) in [
            (value.denied, sweep.requests),
            (value.keys_denied, sweep.keys),
            (value.all_denied, sweep.decided),
            (value.all_keys_denied, sweep.all_keys),
        ] {
            let share = escaped(&percent(part, whole));
            let _ = write!(
                out,
                "<td class=\"n\">{part}</td><td class=\"n\">{share}</td>"
            );
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table>\n");
}

/// Draws the shares of denied requests and keys as functions of the limit.
fn sweep_chart(out: &mut String, title: &str, sweep: &SweepReport) {
    let mut values: Vec<&SweepValue> = sweep.values.iter().collect();
    values.sort_by_key(|value| value.position);
    // Shares are in hundredths of a percent, rounded up so that a small share differs from zero.
    let share = |part: u64, whole: u64| {
        let share = (u128::from(part) * 10_000).div_ceil(u128::from(whole.max(1)));
        u64::try_from(share).unwrap_or(10_000)
    };
    let series = |name: &'static str, whole: u64, part: fn(&SweepValue) -> u64| {
        let values = values.iter().map(|value| {
            let part = part(value);
            let text = format!("{part} of {whole} denied ({})", percent(part, whole));
            (share(part, whole), text)
        });
        Series {
            name,
            values: values.collect(),
        }
    };
    let series = vec![
        series("requests of the rule", sweep.requests, |value| value.denied),
        series("keys of the rule", sweep.keys, |value| value.keys_denied),
        series("all requests", sweep.decided, |value| value.all_denied),
    ];
    let heights = series.iter().flat_map(|series| &series.values);
    let highest = heights.map(|(height, _)| *height).max().unwrap_or(0);
    let top = round_top(highest.max(100)).min(10_000);
    let points = values.iter().map(|value| Point {
        position: value.position,
        label: value.limit.clone(),
    });
    let curves = Curves {
        title,
        horizontal: &match &sweep.axis {
            Axis::Count(unit) => format!("limit ({unit})"),
            Axis::Order => "limits, in the order in which they were given".to_owned(),
        },
        vertical: "share denied (percent)",
        points: points.collect(),
        series,
        top: (top, percent(top, 10_000)),
    };
    curves.draw(out);
}

fn suggestions(out: &mut String, report: &SimulationReport) {
    if report.suggestions.is_empty() {
        return;
    }
    out.push_str("<h2>Suggested limits</h2>\n<p>Requests (units of cost) in the busiest window of each key.</p>\n<table><tr><th>rule</th><th>window</th><th class=\"n\">keys</th><th class=\"n\">p50</th><th class=\"n\">p90</th><th class=\"n\">p99</th><th class=\"n\">p99.9</th><th class=\"n\">max</th><th>limit</th><th class=\"n\">keys denied</th></tr>\n");
    for suggestion in &report.suggestions {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td></tr>",
            escaped(&suggestion.rule),
            duration(suggestion.window_ms),
            suggestion.keys,
            suggestion.p50,
            suggestion.p90,
            suggestion.p99,
            suggestion.p99_9,
            suggestion.max,
            suggestion.limit,
            suggestion.keys_denied
        );
    }
    out.push_str("</table>\n");
}

fn frontiers(out: &mut String, report: &SimulationReport) {
    if report.frontier.is_empty() {
        return;
    }
    out.push_str("<h2>Suggested bursts</h2>\n");
    for frontier in &report.frontier {
        let (rule, limit) = (&frontier.rule, &frontier.limit);
        let title = format!("Rule {rule}, {limit}: the smallest burst for each rate");
        let _ = writeln!(
            out,
            "<h3>{}</h3>\n<p>Each burst denies at most {} of the {} keys.</p>",
            escaped(&title),
            frontier.share,
            frontier.keys
        );
        frontier_chart(out, &title, frontier);
        out.push_str("<table><tr><th>rate</th><th class=\"n\">burst</th><th>limit</th><th class=\"n\">keys denied</th></tr>\n");
        for point in &frontier.points {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td></tr>",
                point.rate, point.burst, point.limit, point.keys_denied
            );
        }
        out.push_str("</table>\n");
    }
}

/// Draws the smallest burst as a function of the rate.
fn frontier_chart(out: &mut String, title: &str, frontier: &Frontier) {
    let points = frontier.points.iter();
    let values = points.clone().map(|point| {
        let text = format!("{}, which denies {} keys", point.limit, point.keys_denied);
        (point.burst, text)
    });
    let highest = points.clone().map(|point| point.burst).max().unwrap_or(0);
    let top = round_top(highest);
    let curves = Curves {
        title,
        horizontal: "rate (units per time)",
        vertical: "burst (units)",
        points: points
            .map(|point| Point {
                position: point.position,
                label: point.rate.clone(),
            })
            .collect(),
        series: vec![Series {
            name: "smallest burst",
            values: values.collect(),
        }],
        top: (top, top.to_string()),
    };
    curves.draw(out);
}

fn notes(out: &mut String, report: &SimulationReport) {
    out.push_str("<h2>Notes</h2>\n<ul>\n");
    for rule in &report.rules {
        for note in &rule.notes {
            let _ = writeln!(out, "<li>{}: {}</li>", escaped(&rule.rule), escaped(note));
        }
    }
    for note in &report.notes {
        let _ = writeln!(out, "<li>{}</li>", escaped(note));
    }
    out.push_str("</ul>\n");
}

fn key_text(values: &[String]) -> String {
    if values.is_empty() {
        return "(all)".to_owned();
    }
    escaped(&values.join(" "))
}

/// Escapes a string for HTML. Control characters are replaced by visible escape sequences.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ if letter.is_control() => out.extend(letter.escape_default()),
            _ => out.push(letter),
        }
    }
    out
}

/// Formats a time as a date.
fn date(millis: u64) -> String {
    let seconds = i64::try_from(millis / 1_000).ok();
    let instant = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    instant.map_or_else(|| "-".to_owned(), |instant| instant.to_string())
}

/// Formats a duration with its unit: `8 s`, `2 min`.
fn duration(millis: u64) -> String {
    for (unit, name) in [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "min"),
        (1_000, "s"),
    ] {
        if millis >= unit && millis.is_multiple_of(unit) {
            return format!("{} {name}", millis / unit);
        }
    }
    format!("{millis} ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escaped("<script>\"&'\u{1b}"),
            "&lt;script&gt;&quot;&amp;&#39;\\u{1b}"
        );
        let mut timeline = Timeline::default();
        let now = tidegate_core::Timestamp::from_micros(1_795_325_114_000_000);
        timeline.count(now, false);
        timeline.count(now, true);
        let mut out = String::new();
        chart(&mut out, "</svg></div><b>", &timeline);
        assert!(
            !out.contains("<b>") && out.contains("requests 2, denied 1"),
            "{out}"
        );
        assert!(
            out.contains("requests per 1 s") && out.contains("time (UTC)"),
            "{out}"
        );
    }
}
