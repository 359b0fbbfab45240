//! The Redis protocol listener: `CL.THROTTLE`, `THROTTLE` and `TIDEGATE.CHECK` for any Redis
//! client.
//!
//! A command passes through several modules. `connection` does I/O and enforces timeouts, `worker`
//! runs the complete commands, and `parse` splits a few commands at a time into arguments, without
//! copying the arguments. Then `command` runs one command, `reply` writes the reply, and `pending`
//! holds decisions that must wait, for example for Redis.
//!
//! Commands that are read together form a batch, which is parsed, evaluated and answered together,
//! with one `read` and one `write`. The store prefetches the batch's keys before the first
//! decision. Batching makes pipelines fast. All decisions in a batch have the same timestamp.
//!
//! The memory that one client can make the server use is bounded, even if the client sends large
//! commands or does not read replies. The module [`bounds`] contains all these bounds.

pub mod bounds;

mod command;
mod connection;
mod limit_parameters;
mod moved;
mod parse;
mod pending;
mod reply;
mod session;
mod transaction;
mod worker;

use std::{io, net::TcpListener, sync::Arc, time::Duration};

use tidegate_limiter::ServerLimiter;
use tidegate_net::{
    Bounds, Listener, Server, Tls,
    auth::{self, Authenticator},
};

use self::session::RespSession;

/// Returns the default bounds of this listener. They equal the general defaults, except for an idle
/// timeout of one hour: clients' connection pools keep connections open for a long time and do not
/// handle lost connections well.
#[must_use]
pub fn default_bounds() -> Bounds {
    Bounds {
        idle: Duration::from_secs(3_600),
        ..Bounds::default()
    }
}

/// Serves the Redis protocol on `socket`.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    limiter: Arc<ServerLimiter>,
) -> io::Result<Listener> {
    let context = RespContext {
        limiter,
        username: None,
        password: None,
        tls: None,
        top: false,
    };
    listen_guarded(server, socket, bounds, context)
}

/// The dependencies and settings of the Redis protocol listener.
#[derive(Clone)]
pub struct RespContext {
    /// The limiter.
    pub limiter: Arc<ServerLimiter>,
    /// The user name that `AUTH` requires; `None` means `default`.
    pub username: Option<String>,
    /// The password that `AUTH` requires; `None` if no authentication is required.
    pub password: Option<String>,
    /// The TLS configuration with the listener's certificate; `None` for plaintext connections.
    pub tls: Option<Arc<Tls>>,
    /// Whether clients may run `TIDEGATE.TOP`, which reveals the keys of all clients.
    pub top: bool,
}

/// Omits the password, so that no log contains the password.
impl std::fmt::Debug for RespContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RespContext")
            .field("username", &self.username)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// Works like [`listen`], with the authentication and TLS settings in `context`.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen_guarded(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: RespContext,
) -> io::Result<Listener> {
    let RespContext {
        limiter,
        username,
        password,
        tls,
        top,
    } = context;
    let clock = limiter.clock().clone();
    let username: Arc<str> = username.as_deref().unwrap_or(session::DEFAULT_USER).into();
    let password = password.filter(|password| !password.is_empty());
    let secret = password.map(|password| auth::login(username.as_bytes(), password.as_bytes()));
    let authenticator = Authenticator::new("resp", secret.as_deref(), clock);
    let authenticator = Arc::new(authenticator);
    limiter
        .metrics()
        .show_authenticator(Arc::clone(&authenticator));
    server.listen(socket, bounds, move |stream, connection| {
        let (limiter, tls) = (Arc::clone(&limiter), tls.clone());
        let session = RespSession::new(RespSession::next_id(), connection.peer)
            .guarded_by(&authenticator, &username)
            .listing_keys(top);
        async move {
            let Some(tls) = connection.tls_to_accept(tls.as_ref()) else {
                return connection::serve(session, stream, connection, limiter).await;
            };
            if let Some(stream) = tls.accept_in_time(stream, &connection).await {
                connection::serve(session, stream, connection, limiter).await;
            }
        }
    })
}

/// Returns the replies to `input` from a client with the connection ID 1. The function uses no
/// socket. The function is for tests and fuzzing, and does not support a Redis-backed limiter.
#[cfg(any(test, fuzzing))]
#[must_use]
pub fn transcript(limiter: &ServerLimiter, input: &[u8]) -> Vec<u8> {
    let client = std::net::SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 1));
    let mut session = RespSession::new(1, client);
    let mut executor = worker::CommandExecutor::default();
    let (mut at, mut output) = (0, Vec::new());
    loop {
        let progress = executor.answer(limiter, &mut session, &input[at..]);
        output.extend_from_slice(&executor.output);
        at += progress.used;
        if !progress.more {
            return output;
        }
    }
}
