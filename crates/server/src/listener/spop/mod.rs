//! The SPOP listener: an agent for HAProxy's Stream Processing Offload Engine (SPOE).
//!
//! HAProxy sends a NOTIFY frame for each event, and waits for the ACK frame. The ACK sets variables
//! of the HAProxy transaction. The modules are `frame` (encoding of frames), `session` (handshake
//! and order of frames), `check` (decision on the request in a NOTIFY), and `connection` (I/O and
//! timeouts).
//!
//! The agent supports version 2.0 and pipelining. The agent does not support fragmentation, so the
//! maximum frame length bounds the memory for a request. All bounds are in [`bounds`].

pub mod bounds;

mod check;
mod connection;
mod frame;
mod session;

use std::{io, net::TcpListener, sync::Arc};

use tidegate_config::Headers;
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Bounds, Listener, Server, Tls};

use self::session::SpopSession;

/// The dependencies and settings of the SPOP listener.
#[derive(Clone, Debug)]
pub struct SpopContext {
    /// The limiter.
    pub limiter: Arc<ServerLimiter>,
    /// The settings for rate limit headers. HAProxy receives each header as a variable.
    pub headers: Headers,
    /// The TLS configuration with the listener's certificate; `None` for plaintext connections.
    pub tls: Option<Arc<Tls>>,
}

/// Serves HAProxy's Stream Processing Offload Protocol on `socket`.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: SpopContext,
) -> io::Result<Listener> {
    let context = Arc::new(context);
    server.listen(socket, bounds, move |stream, connection| {
        let context = Arc::clone(&context);
        async move {
            let session = SpopSession::new(context.headers.writer());
            let Some(tls) = connection.tls_to_accept(context.tls.as_ref()) else {
                return connection::serve(session, stream, connection, &context.limiter).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                connection::serve(session, stream, connection, &context.limiter).await;
            }
        }
    })
}

/// Returns the frames that the agent sends in response to `input` from HAProxy. The function uses
/// no socket. The function is for tests and fuzzing, and does not support a Redis-backed limiter.
#[cfg(any(test, fuzzing))]
#[must_use]
pub fn transcript(limiter: &ServerLimiter, headers: Headers, input: &[u8]) -> Vec<u8> {
    use futures_util::FutureExt as _;

    use self::session::Next;

    let mut session = SpopSession::new(headers.writer());
    let (mut at, mut output) = (0, Vec::new());
    loop {
        let mut out = Vec::new();
        // A decision in the memory store never suspends.
        let answered = session.answer(limiter, &input[at..], &mut out);
        let Some(progress) = answered.now_or_never() else {
            return output;
        };
        output.append(&mut out);
        at += progress.consumed;
        if progress.next != Next::Write {
            return output;
        }
    }
}
