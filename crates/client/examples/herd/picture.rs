//! The runs as an SVG with one panel each.

use std::fmt::{self, Write as _};

use tidegate_client::Jitter;

use super::simulation::{BAR, CLIENTS, Herd, Listening};

/// The plotted time, in seconds; slightly more than the slowest run takes.
const SECONDS: u32 = 40;
const BAR_WIDTH: u32 = 2;
/// The number of requests of a bar of full height. A higher bar is cut off and labelled with its
/// height.
const MOST: u32 = 400;
const HEIGHT: u32 = 120;

const PANEL_WIDTH: u32 = 470;
const PANEL_HEIGHT: u32 = 205;
const TOP: u32 = 78;

const ADMITTED: &str = "#1b7f79";
const REFUSED: &str = "#e07a3f";
const INK: &str = "#2b2b2b";
const FAINT: &str = "#8a8a8a";

/// Draws the runs, those that honor `Retry-After` beside those that ignore it.
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
    let title = format!("{CLIENTS} clients at once, and a server that takes 100 a second");
    label(svg, (20, 26), 17, INK, &title)?;
    legend(svg)?;
    for (number, herd) in (0..).zip(herds) {
        let column = match herd.listening {
            Listening::No => 0,
            Listening::Yes => 1,
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
    let millis = BAR.as_millis_ceil();
    for (x, color, text) in [(20, ADMITTED, "admitted"), (100, REFUSED, "refused")] {
        writeln!(
            svg,
            "<rect x=\"{x}\" y=\"41\" width=\"10\" height=\"10\" fill=\"{color}\"/>"
        )?;
        label(svg, (x + 15, 50), 12, INK, text)?;
    }
    label(
        svg,
        (175, 50),
        12,
        FAINT,
        &format!("requests in {millis} ms, over {SECONDS} s"),
    )
}

fn panel(svg: &mut String, left: u32, top: u32, herd: &Herd) -> fmt::Result {
    label(svg, (left, top + 12), 13, INK, &name(herd))?;
    label(svg, (left, top + 28), 12, FAINT, &summary(herd))?;
    let base = top + 40 + HEIGHT;
    for second in (0..=SECONDS).step_by(10) {
        let x = left + second * bars_in(1) * BAR_WIDTH;
        writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{base}\" stroke=\"#e4e4e4\"/>",
            base - HEIGHT
        )?;
        label(svg, (x, base + 15), 11, FAINT, &format!("{second} s"))?;
    }
    for (number, (admitted, refused)) in (0..bars_in(SECONDS)).zip(&herd.bars) {
        bar(svg, (left + number * BAR_WIDTH, base), *admitted, *refused)?;
    }
    Ok(())
}

fn bar(svg: &mut String, (x, base): (u32, u32), admitted: u32, refused: u32) -> fmt::Result {
    let tall = |requests: u32| (requests.min(MOST) * HEIGHT).div_ceil(MOST);
    let (lower, whole) = (tall(admitted), tall(admitted + refused));
    for (from, to, color) in [(0, lower, ADMITTED), (lower, whole, REFUSED)] {
        if to > from {
            let (y, height) = (base - to, to - from);
            writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{BAR_WIDTH}\" height=\"{height}\" fill=\"{color}\"/>"
            )?;
        }
    }
    if admitted + refused > MOST {
        let height = (admitted + refused).to_string();
        label(svg, (x + 4, base - HEIGHT + 9), 10, FAINT, &height)?;
    }
    Ok(())
}

fn bars_in(seconds: u32) -> u32 {
    let millis = u32::try_from(BAR.as_millis_ceil()).unwrap_or(1);
    seconds * 1_000 / millis
}

fn label(svg: &mut String, (x, y): (u32, u32), size: u32, color: &str, text: &str) -> fmt::Result {
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
    match herd.listening {
        Listening::No => format!("{jitter}, Retry-After ignored"),
        Listening::Yes => format!("{jitter}, Retry-After honoured"),
    }
}

/// The first bar is skipped, because it is the same in all runs: all clients at once.
fn summary(herd: &Herd) -> String {
    let back = herd
        .bars
        .iter()
        .skip(1)
        .map(|(admitted, refused)| admitted + refused);
    let tenths = herd.done.as_millis_ceil().div_ceil(100);
    format!(
        "{} refused; at most {} come back together; done in {}.{} s",
        herd.refused,
        back.max().unwrap_or(0),
        tenths / 10,
        tenths % 10
    )
}
