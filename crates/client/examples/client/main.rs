//! Three ways to call a rate-limited service, demonstrated with a running `tidegate serve`.
//!
//! ```sh
//! cargo run -q -p tidegate-client --features reqwest --example client -- http://127.0.0.1:8080
//! ```

mod calls;

use std::io::{self, Write as _};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = std::env::args().nth(1);
    let server = server.ok_or("usage: client http://127.0.0.1:8080")?;
    let lines = calls::all(&server).await?;
    Ok(io::stdout().write_all(lines.as_bytes())?)
}
