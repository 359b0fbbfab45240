//! Tests that secrets in the rules file appear neither in the log nor in the admin listener's
//! responses.

use std::fs;

use crate::{
    servers::{eventually, reserve_port},
    support::{Ask, EVERY_LISTENER, Scratch, Server},
};

const SECRET: &str = "hunter2";

/// Redis is unreachable, so the server reports the connection error in the log and in admin
/// responses. After that, a reload fails with a message about the value that contains the secret.
#[test]
fn the_password_of_redis_is_neither_logged_nor_shown() {
    let port = reserve_port();
    let store = |url: &str| format!("{EVERY_LISTENER}store: {{redis: '{url}', timeout: 1ms}}\n");
    let valid = store(&format!("redis://tidegate:{SECRET}@127.0.0.1:{port}/3"));
    let mut server = Server::start_in(Scratch::new(), &valid);
    let pages = |server: &Server| {
        ["/readyz", "/v1/status", "/v1/rules", "/metrics"].map(|path| {
            let answer = Ask::get(server.admin, path).send();
            assert_eq!(answer.status, 200, "{path}: {}", answer.body);
            answer.body
        })
    };
    let mut seen = eventually("the pages tell that Redis is unreachable", || {
        let pages = pages(&server);
        let tells =
            |page: &String| page.contains("unreachable") && page.contains(&port.to_string());
        pages[..2].iter().all(tells).then(|| pages.concat())
    });
    for url in [
        format!("redis://tidegate:{SECRET}@127.0.0.1:{port}/three"),
        format!("http://:{SECRET}@127.0.0.1"),
        format!("{SECRET}@127.0.0.1"),
    ] {
        fs::write(server.rules_file(), store(&url)).unwrap();
        let answer = Ask::new("POST", server.admin, "/v1/reload").send();
        assert_ne!(answer.status, 200, "{url}: {}", answer.body);
        seen.push_str(&answer.body);
        server.wait_for(&["kept the old rules", "store"]);
        let pages = pages(&server);
        assert!(pages[0].contains("store"), "{pages:?}");
        seen.push_str(&pages.concat());
    }
    server.signal("TERM");
    let log = server.log_text();
    let (_, rest, _scratch) = server.wait();
    for text in [seen, log, rest.concat()] {
        assert!(!text.contains(SECRET), "{text}");
    }
}

/// systemd passes credentials in a folder, and containers pass secrets as files.
#[test]
fn a_secret_may_be_in_a_file() {
    let settings = "admin: {token_env: TOKEN}\n";
    let config = format!("{EVERY_LISTENER}{settings}");
    let scratch = Scratch::new();
    let folder = scratch.path().display().to_string();
    let file = scratch
        .write("TOKEN", "s3cret-of-systemd\n")
        .display()
        .to_string();
    for variable in [("CREDENTIALS_DIRECTORY", folder), ("TOKEN_FILE", file)] {
        let server = Server::start_with(Scratch::new(), &config, &[variable]);
        let status = |token: &str| {
            let header = format!("Bearer {token}");
            let ask = Ask::get(server.admin, "/v1/status");
            ask.header("authorization", &header).send().status
        };
        assert_eq!(status("s3cret-of-systemd"), 200);
        assert_eq!(status("another"), 401);
        server.stop();
    }
}
