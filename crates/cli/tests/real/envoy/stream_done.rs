//! Tests costs that Envoy reports at the end of a response, with the configurations in
//! `docs/envoy.md`. The application's response says that the request used 7 tokens of at most 10.

use std::{fs, thread, time::Duration};

use super::{BOOTSTRAP, LIMITS, Pair};
use crate::support::{EVERY_LISTENER, Envoy, Scratch, Server, repository};

/// The first line of an existing route in the bootstrap file. The test inserts its routes before
/// this line.
const FIRST_ROUTE: &str = "                        - match: {prefix: /override}\n";

/// The last line of the application's route in the bootstrap file.
const RESPONSE: &str = "body: {inline_string: \"Here you are\\n\"}}";

/// The maximum number of times that the test reads the remaining hits until they have the expected
/// value. Several reads may be necessary, because Envoy calls the service after it has sent the
/// response.
const READS: u32 = 500;

impl Pair {
    /// Starts an Envoy with the routes `/tokens` and `/budget`, whose `rate_limits` are the YAML
    /// blocks in the document. Requests to the additional routes `/left/tokens` and `/left/budget`
    /// return the remaining hits and are not charged.
    fn of_the_document() -> Self {
        let page = fs::read_to_string(repository().join("docs/envoy.md")).unwrap();
        let blocks = page
            .split("```yaml\n")
            .filter(|block| block.starts_with("rate_limits:"));
        let blocks = blocks.map(|block| block.split("```").next().unwrap());
        let [tokens, budget] = blocks.collect::<Vec<_>>()[..] else {
            panic!("docs/envoy.md has other configurations");
        };
        let mut routes = String::new();
        for (name, limits) in [("tokens", tokens), ("budget", budget)] {
            let read = format!(
                "rate_limits:\n  - actions: [{{request_headers: {{header_name: x-api-key, descriptor_key: {name}}}}}]\n    hits_addend: {{number: 0}}\n"
            );
            routes += &route(&format!("/left/{name}"), &read);
            routes += &route(&format!("/{name}"), limits);
        }
        let headers = format!(
            "{RESPONSE}\n                          response_headers_to_add: [{{header: {{key: x-tokens, value: '7'}}}}, {{header: {{key: x-unused-tokens, value: '3'}}}}]"
        );
        assert!(BOOTSTRAP.contains(FIRST_ROUTE) && BOOTSTRAP.contains(RESPONSE));
        let bootstrap = BOOTSTRAP
            .replacen(FIRST_ROUTE, &format!("{routes}{FIRST_ROUTE}"), 1)
            .replace(RESPONSE, &headers);
        let scratch = Scratch::new();
        scratch.write("shop.yaml", LIMITS);
        let config = format!("{EVERY_LISTENER}envoy: {{config: shop.yaml}}\n");
        let tidegate = Server::start_in(scratch, &config);
        let envoy = Envoy::start(&bootstrap, tidegate.grpc);
        Self { tidegate, envoy }
    }

    fn status(&self, path: &str, max_tokens: &str) -> u16 {
        let request = self.ask(path).header("x-api-key", "alice");
        request.header("x-max-tokens", max_tokens).send().status
    }

    /// Waits until `expected` hits remain.
    fn wait_for_left(&self, name: &str, expected: &str) {
        let mut left = String::new();
        for _ in 0..READS {
            let request = self.ask(&format!("/left/{name}"));
            let answer = request.header("x-api-key", "alice").send();
            answer.header("x-ratelimit-remaining").clone_into(&mut left);
            if left == expected {
                return;
            }
            thread::park_timeout(Duration::from_millis(10));
        }
        panic!("{left} remain, and not {expected}");
    }
}

/// Returns a route for the bootstrap file, with these `rate_limits`.
fn route(prefix: &str, limits: &str) -> String {
    let indent = " ".repeat(24);
    let limits: String = limits
        .lines()
        .map(|line| format!("{indent}      {line}\n"))
        .collect();
    format!(
        "{indent}- match: {{prefix: {prefix}}}\n{indent}  route: {{cluster: application}}\n{indent}  typed_per_filter_config:\n{indent}    envoy.filters.http.ratelimit:\n{indent}      \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute\n{limits}"
    )
}

#[test]
fn the_cost_of_a_response_is_charged_at_its_end() {
    let pair = Pair::of_the_document();
    pair.wait_for_left("tokens", "10");
    assert_eq!(pair.status("/tokens", "10"), 200);
    pair.wait_for_left("tokens", "3");
    assert_eq!(pair.status("/tokens", "10"), 200, "some tokens are left");
    pair.wait_for_left("tokens", "0");
    assert_eq!(pair.status("/tokens", "10"), 429, "14 of 10 are spent");
}

#[test]
fn the_unused_part_of_a_maximum_is_refunded_at_the_end() {
    let pair = Pair::of_the_document();
    assert_eq!(pair.status("/budget", "10"), 200);
    pair.wait_for_left("budget", "3");
    assert_eq!(pair.status("/budget", "3"), 200, "3 are left");
    // The application always reports 3 unused tokens.
    pair.wait_for_left("budget", "3");
    assert_eq!(pair.status("/budget", "4"), 429);
}
