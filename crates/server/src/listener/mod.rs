//! The listeners. Each module is the only code that knows its wire format.

pub mod admin;
mod auth;
mod cross_site;
pub mod grpc;
pub mod http;
pub mod proxy;
pub mod resp;

pub use auth::Authenticator;

use std::sync::Arc;

use crate::{config::Identity, net::Exempt};

/// Exempts trusted proxies from the connection limit per client, because they carry many clients.
fn exempt(identity: &Arc<Identity>) -> Exempt {
    let identity = Arc::clone(identity);
    Arc::new(move |peer| identity.trust.is_trusted(peer))
}
