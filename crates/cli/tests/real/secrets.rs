//! Secrets of the rules file must not appear in the log or on the admin listener.

use std::fs;

use crate::{
    servers::eventually,
    support::{Ask, EVERY_DOOR, Scratch, Server, free_port},
};

const SECRET: &str = "hunter2";

/// Redis is unreachable, so the server reports the connection error in the log and on the pages.
/// Then a reload fails with a message about the value that contains the secret.
#[test]
fn the_password_of_redis_is_neither_logged_nor_shown() {
    let port = free_port();
    let store = |url: &str| format!("{EVERY_DOOR}store: {{redis: '{url}', timeout: 1ms}}\n");
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
    let said = server.said();
    let (_, rest, _scratch) = server.wait();
    for text in [seen, said, rest.concat()] {
        assert!(!text.contains(SECRET), "{text}");
    }
}
