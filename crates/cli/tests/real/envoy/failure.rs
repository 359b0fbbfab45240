//! Tests Envoy's behaviour while Tidegate is down and after it is back.

use super::{BOOTSTRAP, LIMITS};
use crate::{
    servers::reserve_port,
    support::{Ask, Envoy, Scratch, Server},
};

/// The maximum number of requests that the test sends while it waits for Envoy to reconnect. Envoy
/// waits for up to half a second between two connection attempts.
const TRIES: u32 = 100_000;

#[test]
fn envoy_fails_open_or_closed_without_tidegate_and_recovers_with_it() {
    let scratch = Scratch::new();
    scratch.write("shop.yaml", LIMITS);
    let config = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:{}', resp: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n\
         envoy: {{config: shop.yaml}}\n",
        reserve_port()
    );
    let tidegate = Server::start_in(scratch, &config);
    let envoy = Envoy::start(BOOTSTRAP, tidegate.grpc);
    let ask = |listener| Ask::get(envoy.listener(listener), "/").send();
    let is_limited = |listener| !ask(listener).header("x-ratelimit-limit").is_empty();
    assert!(is_limited("open") && is_limited("closed"));

    tidegate.signal("KILL");
    let (_, _, scratch) = tidegate.wait();
    for _ in 0..20 {
        let (open, closed) = (ask("open"), ask("closed"));
        assert_eq!((open.status, open.body.as_str()), (200, "Here you are\n"));
        assert_eq!((closed.status, closed.body.as_str()), (500, ""));
    }

    let _tidegate = Server::start_in(scratch, &config);
    for listener in ["open", "closed"] {
        let found = (0..TRIES).any(|_| is_limited(listener));
        assert!(found, "{listener}");
    }
    assert_eq!(ask("closed").status, 200);
}
