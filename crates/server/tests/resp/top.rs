//! Tests of `TIDEGATE.TOP`.

use std::{net::TcpListener, sync::Arc};

use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp, top::TopBounds};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Listener, Server};
use tidegate_server::listener::resp::{self, RespContext};

use crate::listener::Client;

const RULES: &str = "rules: [{name: api, key: [customer], limits: [2/h], algorithm: fixed_window}]";

struct TopListener {
    listener: Listener,
    _server: Server,
}

impl TopListener {
    fn open(top: bool) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(1_700_000_000_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let rules = Config::parse(RULES).unwrap().rules;
        let limiter = ServerLimiter::new(rules, store, clock).with_top(Some(TopBounds::default()));
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let context = RespContext {
            limiter: Arc::new(limiter),
            username: None,
            password: Some("secret".to_owned()),
            tls: None,
            top,
        };
        let listener =
            resp::listen_guarded(&server, socket, resp::default_bounds(), context).unwrap();
        Self {
            listener,
            _server: server,
        }
    }

    fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr())
    }
}

#[test]
fn keys_are_listed_to_clients_with_the_password() {
    let top = TopListener::open(true);
    let mut client = top.connect();
    assert_eq!(
        client.command("TIDEGATE.TOP").to_string(),
        "-NOAUTH Authentication required."
    );
    client.command("AUTH secret");
    for _ in 0..5 {
        client.command("TIDEGATE.CHECK customer acme");
    }
    client.command("TIDEGATE.CHECK PEEK customer acme");
    client.command("TIDEGATE.CHECK COST 2 customer globex");
    client.command("CL.THROTTLE user:1 1 1 60");
    let from_until = "1699999680000, 1700000000000";
    for (command, expected) in [
        (
            "TIDEGATE.TOP",
            r#"[7, 3, 8], [["api", ["acme"], 5, 0], [nil, ["user:1"], 1, 0], ["api", ["globex"], 1, 0]]"#,
        ),
        (
            "TIDEGATE.TOP api COUNT 1",
            r#"[6, 3, 7], [["api", ["acme"], 5, 0]]"#,
        ),
        (
            "tidegate.top api by denied over 5m",
            r#"[6, 3, 7], [["api", ["acme"], 3, 0]]"#,
        ),
        (
            "TIDEGATE.TOP api BY cost",
            r#"[6, 3, 7], [["api", ["acme"], 5, 0], ["api", ["globex"], 2, 0]]"#,
        ),
    ] {
        let answer = client.command(command).to_string();
        assert_eq!(answer, format!("[{from_until}, {expected}]"), "{command}");
    }
    for (command, expected) in [
        (
            "TIDEGATE.TOP BY asked",
            "-ERR BY must be requests, denied or cost, got `asked`",
        ),
        (
            "TIDEGATE.TOP OVER 2h",
            "-ERR OVER must be 5m, 15m, 1h or 1d, got `2h`",
        ),
        (
            "TIDEGATE.TOP COUNT 0",
            "-ERR COUNT must be a number from 1 to 1000, got `0`",
        ),
        (
            "TIDEGATE.TOP LIMIT 3",
            "-ERR unknown option 'LIMIT'; expected BY, OVER or COUNT",
        ),
        ("TIDEGATE.TOP nothing", "-ERR there is no rule \"nothing\""),
    ] {
        assert_eq!(client.command(command).to_string(), expected);
    }
    // A transaction also waits for the reply to `TIDEGATE.TOP`.
    for command in ["MULTI", "TIDEGATE.TOP api COUNT 1", "PING"] {
        client.command(command);
    }
    let answers = client.command("EXEC").to_string();
    assert!(
        answers.contains("\"acme\"") && answers.ends_with("+PONG]"),
        "{answers}"
    );
}

#[test]
fn the_command_is_off_by_default() {
    let top = TopListener::open(false);
    let mut client = top.connect();
    client.command("AUTH secret");
    let refused = client.command("TIDEGATE.TOP").to_string();
    assert!(
        refused.starts_with("-NOPERM ") && refused.contains("`top: true`"),
        "{refused}"
    );
}
