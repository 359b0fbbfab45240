//! The Redis-protocol door: `CL.THROTTLE`, `THROTTLE` and `TIDEGATE.CHECK` for any Redis client.
//!
//! Read in this order, the modules tell a connection's story: `connection` moves bytes and watches the
//! clock, `desk` answers every command that has arrived whole, `parse` takes a few of them apart without copying
//! them, `command` runs one, `reply` writes the answer, and `waiting` holds what Redis is still to decide.
//!
//! What is read together is parsed, decided and answered together, with one `read` and one `write`, and what the store
//! keeps of the keys is fetched before the first is decided: that is why a pipeline is fast. All throttles of such a batch are decided at one
//! instant, the one at which the batch was taken up.
//!
//! A client can make this door hold a bounded amount of memory, whatever it sends or does not read: every
//! maximum has a name in [`bounds`].

pub mod bounds;

mod command;
mod connection;
mod desk;
mod inline;
mod limits_cache;
mod parse;
mod reply;
mod session;
mod transaction;
mod waiting;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use self::{desk::Desk, session::Session};
use crate::{
    limiter::Limiter,
    net::{Bounds, Listener, Server},
};

/// The bounds of this door's connections, unless configured: those of every door, but a connection may be
/// quiet for an hour, because pools keep connections and take it ill when one is gone.
#[must_use]
pub fn default_bounds() -> Bounds {
    Bounds {
        idle: Duration::from_secs(3_600),
        ..Bounds::default()
    }
}

/// Answers the Redis protocol on `socket`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    limiter: Arc<Limiter>,
) -> io::Result<Listener> {
    server.listen(socket, bounds, move |stream, connection| {
        connection::serve(stream, connection, Arc::clone(&limiter))
    })
}

/// What a client that sends `input` and leaves is answered: the door without a socket, for tests and
/// fuzzing, and without a fleet. The client is number 1.
#[must_use]
pub fn transcript(limiter: &Limiter, input: &[u8]) -> Vec<u8> {
    let mut session = Session::new(1, SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    let mut desk = Desk::default();
    let (mut at, mut output) = (0, Vec::new());
    loop {
        let progress = desk.answer(limiter, &mut session, &input[at..]);
        output.extend_from_slice(&desk.output);
        at += progress.used;
        if !progress.more {
            return output;
        }
    }
}
