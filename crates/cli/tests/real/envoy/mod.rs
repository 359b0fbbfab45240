//! Tests with a real Envoy in front of an application, with Tidegate as its rate limit service.

mod ext_authz;
mod failure;
mod kuadrant;
mod quota;
mod rate_limit;
mod reload;
mod stream_done;
mod xds;

pub(crate) use self::ext_authz::Authorized;
use crate::support::{Ask, EVERY_LISTENER, Envoy, Scratch, Server};

/// An Envoy bootstrap with two listeners, `open` (fails open) and `closed` (fails closed), and the
/// tests' routes.
const BOOTSTRAP: &str = include_str!("bootstrap.yaml");

/// The windows are a year long and aligned to the Unix epoch, so in practice no window ends during
/// a test.
const LIMITS: &str = "\
domain: shop
descriptors:
  - {key: remote_address, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: api_key, rate_limit: {name: per-key, unit: year, requests_per_unit: 3}}
  - {key: generic_key, value: cost, rate_limit: {unit: year, requests_per_unit: 10}}
  - {key: generic_key, value: override, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: tokens, rate_limit: {unit: year, requests_per_unit: 10}}
  - {key: budget, rate_limit: {unit: year, requests_per_unit: 10}}
";

/// An Envoy and the Tidegate server that it uses.
#[derive(Debug)]
struct Pair {
    tidegate: Server,
    envoy: Envoy,
}

impl Pair {
    /// Starts an Envoy and the Tidegate server that it uses, with these limits for Envoy's domain.
    fn start(limits: &str) -> Self {
        let scratch = Scratch::new();
        scratch.write("shop.yaml", limits);
        let config = format!("{EVERY_LISTENER}envoy: {{config: shop.yaml}}\n");
        let tidegate = Server::start_in(scratch, &config);
        let envoy = Envoy::start(BOOTSTRAP, tidegate.grpc);
        Self { tidegate, envoy }
    }

    /// Creates a request to the listener that fails open.
    fn ask(&self, path: &str) -> Ask {
        Ask::get(self.envoy.listener("open"), path)
    }
}
