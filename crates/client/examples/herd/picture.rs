//! Draws the simulated runs as an SVG, with one panel per run.

use std::fmt::{self, Write as _};

use tidegate_client::Jitter;

use super::simulation::{BAR_TIME, Bar, CLIENTS, Herd, RetryAfter};

/// The length of the time axis, in seconds. The axis is slightly longer than the slowest run.
const SECONDS: u32 = 40;
const BAR_WIDTH: u32 = 2;
/// The number of requests in a bar of full height. A higher bar is cut off and labelled with its
/// number of requests.
const MOST: u32 = 400;
const HEIGHT: u32 = 120;

const PANEL_WIDTH: u32 = 470;
const PANEL_HEIGHT: u32 = 205;
const TOP: u32 = 78;

const ADMITTED: &str = "#1b7f79";
const REFUSED: &str = "#e07a3f";
const INK: &str = "#2b2b2b";
const FAINT: &str = "#8a8a8a";

/// A point in the picture, in pixels from the upper left corner.
#[derive(Clone, Copy)]
struct Point {
    x: u32,
    y: u32,
}

impl Point {
    fn new(x: u32, y: u32) -> Self {
        Self { x, y }
    }
}

/// Draws the runs as an SVG. A run that honours `Retry-After` is beside the run that ignores it.
pub(crate) fn svg(herds: &[Herd]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = draw(&mut text, herds);
    text
}

fn draw(svg: &mut String, herds: &[Herd]) -> fmt::Result {
    let (width, height) = (2 * PANEL_WIDTH + 20, TOP + 3 * PANEL_HEIGHT);
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">"
    )?;
    writeln!(
        svg,
        "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
    )?;
    let title =
        format!("{CLIENTS} clients at once, and a server that admits 100 requests a second");
    label(svg, Point::new(20, 26), 17, INK, &title)?;
    legend(svg)?;
    for (number, herd) in (0..).zip(herds) {
        let column = match herd.retry_after {
            RetryAfter::Ignored => 0,
            RetryAfter::Honored => 1,
        };
        panel(
            svg,
            20 + column * PANEL_WIDTH,
            TOP + number % 3 * PANEL_HEIGHT,
            herd,
        )?;
    }
    writeln!(svg, "</svg>")
}

fn legend(svg: &mut String) -> fmt::Result {
    let millis = BAR_TIME.as_millis_ceil();
    for (x, color, text) in [(20, ADMITTED, "admitted"), (100, REFUSED, "refused")] {
        writeln!(
            svg,
            "<rect x=\"{x}\" y=\"41\" width=\"10\" height=\"10\" fill=\"{color}\"/>"
        )?;
        label(svg, Point::new(x + 15, 50), 12, INK, text)?;
    }
    label(
        svg,
        Point::new(175, 50),
        12,
        FAINT,
        &format!("requests per {millis} ms, for {SECONDS} s"),
    )
}

fn panel(svg: &mut String, left: u32, top: u32, herd: &Herd) -> fmt::Result {
    label(svg, Point::new(left, top + 12), 13, INK, &name(herd))?;
    label(svg, Point::new(left, top + 28), 12, FAINT, &summary(herd))?;
    let base = top + 40 + HEIGHT;
    for second in (0..=SECONDS).step_by(10) {
        let x = left + second * bars_in(1) * BAR_WIDTH;
        writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{base}\" stroke=\"#e4e4e4\"/>",
            base - HEIGHT
        )?;
        label(
            svg,
            Point::new(x, base + 15),
            11,
            FAINT,
            &format!("{second} s"),
        )?;
    }
    for (number, bar) in (0..bars_in(SECONDS)).zip(&herd.bars) {
        let x = left + number * BAR_WIDTH;
        draw_bar(svg, Point::new(x, base), *bar)?;
    }
    Ok(())
}

/// Draws a bar whose lower left corner is `foot`. The lower part of the bar shows the admitted
/// requests, and the upper part the refused requests.
fn draw_bar(svg: &mut String, foot: Point, bar: Bar) -> fmt::Result {
    let Point { x, y: base } = foot;
    let tall = |requests: u32| (requests.min(MOST) * HEIGHT).div_ceil(MOST);
    let (lower, whole) = (tall(bar.admitted), tall(bar.requests()));
    for (from, to, color) in [(0, lower, ADMITTED), (lower, whole, REFUSED)] {
        if to > from {
            let (y, height) = (base - to, to - from);
            writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{BAR_WIDTH}\" height=\"{height}\" fill=\"{color}\"/>"
            )?;
        }
    }
    if bar.requests() > MOST {
        let above = Point::new(x + 4, base - HEIGHT + 9);
        label(svg, above, 10, FAINT, &bar.requests().to_string())?;
    }
    Ok(())
}

fn bars_in(seconds: u32) -> u32 {
    let millis = u32::try_from(BAR_TIME.as_millis_ceil()).unwrap_or(1);
    seconds * 1_000 / millis
}

fn label(svg: &mut String, at: Point, size: u32, color: &str, text: &str) -> fmt::Result {
    let Point { x, y } = at;
    writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{color}\">{text}</text>"
    )
}

fn name(herd: &Herd) -> String {
    let jitter = match herd.jitter {
        Jitter::None => "No jitter",
        Jitter::Equal => "Equal jitter",
        Jitter::Full => "Full jitter",
    };
    match herd.retry_after {
        RetryAfter::Ignored => format!("{jitter}, Retry-After ignored"),
        RetryAfter::Honored => format!("{jitter}, Retry-After honoured"),
    }
}

/// Returns the caption of a run. The caption ignores the first bar, in which all clients send their
/// first request, because it is the same in all runs.
fn summary(herd: &Herd) -> String {
    let returning = herd.bars.iter().skip(1).map(|bar| bar.requests());
    let tenths = herd.done.as_millis_ceil().div_ceil(100);
    format!(
        "{} refused; at most {} retries at once; all admitted after {}.{} s",
        herd.refused,
        returning.max().unwrap_or(0),
        tenths / 10,
        tenths % 10
    )
}
