//! Shows the effect of jitter: a thousand clients are refused at the same time, and each client
//! retries. Prints an SVG.
//!
//! ```sh
//! cargo run -p tidegate-client --example herd > docs/herd.svg
//! ```

mod picture;
mod simulation;

use std::io::{self, Write as _};

fn main() -> io::Result<()> {
    let herds = simulation::all();
    io::stdout().write_all(picture::svg(&herds).as_bytes())
}
