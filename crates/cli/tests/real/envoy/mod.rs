//! A real Envoy in front of an application, asking a real Tidegate.

mod failure;
mod quota;
mod rate_limit;
mod reload;

use crate::support::{Ask, EVERY_DOOR, Envoy, Scratch, Server};

/// Two listeners, `open` and `closed`, and the routes that the tests ask for.
const BOOTSTRAP: &str = include_str!("bootstrap.yaml");

/// Windows of a year: they begin at the epoch's years, and no test runs across one of their ends.
const LIMITS: &str = "\
domain: shop
descriptors:
  - {key: remote_address, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: api_key, rate_limit: {name: per-key, unit: year, requests_per_unit: 3}}
  - {key: generic_key, value: cost, rate_limit: {unit: year, requests_per_unit: 10}}
  - {key: generic_key, value: override, rate_limit: {unit: year, requests_per_unit: 1000}}
";

/// An Envoy, and the Tidegate that it asks.
#[derive(Debug)]
struct Pair {
    tidegate: Server,
    envoy: Envoy,
}

impl Pair {
    /// With these limits for Envoy's domain.
    fn start(limits: &str) -> Self {
        let scratch = Scratch::new();
        scratch.write("shop.yaml", limits);
        let config = format!("{EVERY_DOOR}envoy: {{config: shop.yaml}}\n");
        let tidegate = Server::start_in(scratch, &config);
        let envoy = Envoy::start(BOOTSTRAP, tidegate.grpc);
        Self { tidegate, envoy }
    }

    /// A request through the listener that needs no Tidegate.
    fn ask(&self, path: &str) -> Ask {
        Ask::get(self.envoy.listener("open"), path)
    }
}
