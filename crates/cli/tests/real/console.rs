//! Tests of the console in a real browser.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
};

use serde_json::{Value, json};

use crate::support::{Browser, Server, repository};

const TOKEN: &str = "s3cret";
const READ_TOKEN: &str = "r3ad-only";

const RULES: &str = "
rules:
  - {name: login, when: {path: /login}, key: [ip], limits: [2/h]}
  - {name: uploads, when: {path: /upload}, key: [customer], limits: [100/h]}
  - {name: new-limit, when: {path: /upload}, key: [customer], limits: [1/h], mode: shadow}
  - {name: exports, when: {path: /export}, limits: [5/s]}
";

/// The sizes of a laptop, a tablet and a phone.
const SIZES: [(u32, u32); 3] = [(1440, 900), (1024, 768), (390, 844)];

const VIEWS: [(&str, &str); 9] = [
    ("#/overview", "Busiest key"),
    ("#/denials", "Recent denials"),
    ("#/events", "Key denied"),
    ("#/keys?rule=login", "Keys of rule login"),
    ("#/keys?rule=login&key=203.0.113.9", "in slices of 5 min"),
    ("#/keys?rule=exports", "all requests"),
    (
        "#/explain?path=/login&ip=203.0.113.9",
        "The request would be denied",
    ),
    ("#/blocks", "198.51.100.7"),
    ("#/server", "Reload files"),
];

fn server_with_token() -> Server {
    Server::start(&format!(
        "admin: {{token: '{TOKEN}', tokens: [{{name: viewer, token: '{READ_TOKEN}'}}]}}\n{RULES}"
    ))
}

fn url(server: &Server) -> String {
    format!("http://{}/", server.admin)
}

fn login_request() -> Value {
    json!({"path": "/login", "ip": "203.0.113.9"})
}

/// Opens the console and logs in.
fn logged_in(server: &Server) -> Browser {
    let mut browser = Browser::start();
    browser.open(&url(server));
    log_in(&mut browser, TOKEN);
    browser.wait_for("Latest denials");
    browser
}

fn log_in(browser: &mut Browser, token: &str) {
    browser.fill(".login input[type=password]", token);
    browser.click("Log in");
}

/// Checks that no script has failed, and that the page has not violated its
/// Content-Security-Policy.
fn assert_no_errors(browser: &mut Browser) {
    let mut logged = browser.take_logged();
    logged.retain(|line| !line.starts_with("Failed to load resource: the server responded"));
    assert_eq!(logged, [""; 0]);
}

/// Returns a JavaScript expression for the first visible table row that contains `text`.
fn row(text: &str) -> String {
    format!(
        "[...document.querySelectorAll('main tr')].find((row) => row.checkVisibility() && row.innerText.includes({}))",
        json!(text)
    )
}

#[test]
fn an_operator_logs_in_and_blocks_a_top_talker() {
    let server = server_with_token();
    let mut browser = Browser::start();
    browser.open(&url(&server));
    log_in(&mut browser, "wr\u{f6}ng \u{20ac}");
    browser.wait_for("The server does not accept this token.");
    assert!(!browser.text().contains("Overview"));
    log_in(&mut browser, TOKEN);
    browser.wait_for("No requests in this time.");
    assert_eq!(browser.eval("document.cookie"), "");
    assert_eq!(browser.eval("location.href.includes('s3cret')"), false);

    // If a rule's name has the focus, it keeps the focus while the rows are updated.
    browser.eval("document.querySelector('button.link').focus()");
    for denied in [false, false, true] {
        assert_eq!(server.check(&login_request()).status == 429, denied);
    }
    browser.wait_until(&format!(
        "/3[^]*1[^]*33 %/.test({}.innerText)",
        row("{path: /login}")
    ));
    assert_eq!(browser.eval("document.activeElement.textContent"), "login");

    browser.click("203.0.113.9");
    browser.wait_for("2 of 2");
    browser.click("Block…");
    browser.fill("dialog input", "guessing passwords");
    browser.click("Block");
    browser.wait_for("Blocked until");
    browser.wait_for("guessing passwords");
    let blocked = server.check(&login_request()).json();
    assert_eq!(blocked["reason"], "blocked");
    browser.open(&format!("{}#/blocks", url(&server)));
    browser.wait_until(&row("guessing passwords"));
    browser.click("Unblock");
    browser.wait_for("Lift the block?");
    // The dialog has the focus, so Enter confirms it.
    browser.press("Enter");
    browser.wait_for("No blocks.");
    assert_eq!(server.check(&login_request()).json()["reason"], "limit");

    browser.open(&format!(
        "{}#/keys?rule=login&key=203.0.113.9",
        url(&server)
    ));
    browser.click("Reset counters…");
    browser.click("Reset");
    browser.wait_for("0 of 2");
    assert_eq!(server.check(&login_request()).status, 200);

    // The page keeps the token across a reload, and discards it on logout.
    browser.call("Page.reload", &json!({}));
    browser.wait_for("1 of 2");
    browser.click("Log out");
    browser.wait_for("Admin token");
    assert_eq!(
        browser.eval("sessionStorage.length + localStorage.length"),
        0
    );
    assert!(!browser.text().contains("203.0.113.9"));
}

/// The page must not resend a token that the server no longer accepts. Each attempt would count as
/// a wrong guess, and several attempts would lock out the operator's address.
#[test]
fn an_outdated_token_is_sent_only_once_and_a_read_only_token_hides_the_controls() {
    let server = server_with_token();
    let mut browser = Browser::start();
    let script = "if (location.protocol === 'http:') {
        sessionStorage.setItem('tidegate-token', 'outdated');
        const real = window.fetch;
        window.sent = 0;
        window.fetch = async (...request) => {
          if (request[1].headers.authorization) window.sent += 1;
          return real(...request);
        };
      }";
    browser.run_in_new_pages(script);
    browser.open(&format!("{}#/blocks", url(&server)));
    browser.wait_for("The server does not accept this token.");
    assert_eq!(browser.eval("window.sent"), 1);
    log_in(&mut browser, READ_TOKEN);
    browser.wait_for("No blocks.");
    let shown = browser.text();
    assert!(!shown.contains("Block a key…"), "{shown}");
}

/// Keys come from clients, and reasons come from operators. The page must never parse keys or
/// reasons as HTML.
#[test]
fn keys_with_markup_stay_text() {
    let server = server_with_token();
    let mut browser = logged_in(&server);
    let markup = "<img src=x onerror=\"window.ran=1\"><script>window.ran=1</script>\u{202e}";
    let shown = "<img src=x onerror=\"window.ran=1\"><script>window.ran=1</script>\\u{202e}";
    let request = json!({"path": "/upload", "customer": markup});
    for _ in 0..3 {
        assert_eq!(server.check(&request).status, 200);
    }
    // The page shows the key twice: among the top talkers, and as the rule's busiest key.
    browser.wait_until(&format!(
        "document.body.innerText.split({}).length > 2",
        json!(shown)
    ));
    let talker = "[...document.querySelectorAll('.pair tr')].find((row) => row.innerText.includes('uploads'))";
    browser.wait_until(&format!("{talker}.querySelector('a').click() ?? true"));
    browser.wait_for("3 of 100");
    browser.click("Block…");
    browser.fill("dialog input", markup);
    browser.click("Block");
    browser.wait_for("Blocked until");
    browser.open(&format!("{}#/blocks", url(&server)));
    browser.wait_until(&row("onerror"));
    assert_eq!(
        browser.eval("document.querySelectorAll('main :is(img, script)').length"),
        0
    );
    assert_eq!(browser.eval("window.ran ?? null"), Value::Null);
    assert_no_errors(&mut browser);
}

/// A new denial appears without a page reload, even a denial by a shadow rule. From the denial, the
/// operator can open an explanation of the denied request.
#[test]
fn a_denial_appears_and_is_explained() {
    let server = server_with_token();
    let mut browser = logged_in(&server);
    browser.wait_for("No denials in the last hour.");
    for denied in [false, false, true] {
        assert_eq!(server.check(&login_request()).status == 429, denied);
    }
    let denial =
        "[...document.querySelectorAll('.pair tr')].find((row) => row.innerText.includes('2/h'))";
    browser.wait_until(denial);
    browser.click("Explain");
    browser.wait_for("The request would be denied: a limit is exhausted.");
    browser.wait_for("path is /login, but the rule requires /upload");

    let markup = "<img src=x onerror=\"window.ran=1\">";
    for _ in 0..2 {
        let upload = json!({"path": "/upload", "customer": markup});
        assert_eq!(server.check(&upload).status, 200);
    }
    browser.open(&format!("{}#/denials", url(&server)));
    browser.wait_for("Recent denials");
    browser.wait_until(&row("shadow"));
    browser.click(markup);
    browser.wait_for("Rule new-limit, in shadow mode");
    browser.open(&format!("{}#/keys?rule=login", url(&server)));
    browser.wait_for("Keys of rule login");
    browser.click("203.0.113.9");
    browser.wait_for("2 of 2");
    assert_eq!(browser.eval("window.ran ?? null"), Value::Null);
    assert_no_errors(&mut browser);
}

/// A block by entries denies a request even if no rule applies to it.
#[test]
fn a_block_without_a_rule_is_explained() {
    let server = server_with_token();
    let mut browser = logged_in(&server);
    let block = [
        "block",
        "--entry",
        "ip=203.0.113.7",
        "--for",
        "1h",
        "--reason",
        "flood",
        "--token",
        TOKEN,
    ];
    let blocked = server.operate(&block);
    assert!(blocked.status.success(), "{blocked:?}");
    let page = "#/explain?path=/none&ip=203.0.113.7";
    browser.open(&format!("{}{page}", url(&server)));
    browser.wait_for("The request would be denied: its key or its entries are blocked.");
    browser.wait_for("No rule applies to it.");
    browser.wait_for("Blocked by the entries ip=203.0.113.7 until");
    assert_no_errors(&mut browser);
}

/// Serves a page to the browser. Returns the address of the page.
fn serve_page(page: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close";
            // The browser may open a connection without sending a request on it. A request fits in
            // the buffer, so one read is sufficient.
            if stream.read(&mut [0; 16_384]).unwrap_or_default() == 0 {
                continue;
            }
            let length = page.len();
            let _ = write!(stream, "{head}\r\ncontent-length: {length}\r\n\r\n{page}");
        }
    });
    address
}

/// The server has no token, so every request from this machine takes effect unless the cross-site
/// protection rejects it.
#[test]
fn a_page_of_another_origin_can_do_nothing() {
    let server = Server::start(RULES);
    let admin = url(&server);
    let attack = r#"<!doctype html><title>evil</title><script>
        const admin = "ADMIN";
        const loaded = (tag, name, value) => new Promise((resolve) => {
          const node = document.createElement(tag);
          node[name] = value;
          node.onload = () => resolve(`loaded ${tag}`);
          node.onerror = () => resolve("failed");
          document.documentElement.append(node);
          setTimeout(() => resolve("no event"), 5000);
        });
        const tried = (path, options) => fetch(admin + path, options)
          .then((response) => `${response.type} ${response.status}`, () => "failed");
        const block = JSON.stringify({ for: "1h" });
        (async () => {
          window.results = await Promise.all([
            tried(""),
            tried("v1/status"),
            tried("v1/blocks/login/203.0.113.9", { method: "PUT", body: block }),
            tried("v1/keys/login/203.0.113.9", { method: "DELETE" }),
            loaded("script", "src", `${admin}console/main.js`),
            loaded("img", "src", `${admin}console/icon.svg`),
          ]);
          await tried("v1/reload", { method: "POST", mode: "no-cors" });
          const frame = document.createElement("iframe");
          frame.src = admin;
          document.documentElement.append(frame);
          frame.onload = () => { window.framed = frame.contentDocument ? "own" : "foreign"; };
        })();
        </script>"#;
    let evil = serve_page(attack.replace("ADMIN", &admin));
    assert_eq!(server.check(&login_request()).status, 200);
    let mut browser = Browser::start();
    browser.open(&format!("http://localhost:{}/", evil.port()));
    browser.wait_until("window.framed");
    assert_eq!(browser.eval("window.results"), json!(vec!["failed"; 6]));
    // Instead of the console, the frame shows the browser's error page. The browser has logged the
    // reason.
    let logged = browser.take_logged().join("\n");
    assert!(
        logged.contains("frame-ancestors") || logged.contains("403"),
        "{logged}"
    );

    let metrics = server.metrics();
    assert!(metrics.contains("tidegate_blocks 0\n"), "{metrics}");
    assert!(
        metrics.contains("tidegate_reloads_total{result=\"ok\"} 0\n"),
        "{metrics}"
    );
    assert_eq!(
        server.check(&login_request()).json()["remaining"],
        0,
        "the counters are kept"
    );

    // A link from that page to the console still works. The console needs no login, because this
    // server has no token.
    browser.eval(&format!("location.href = {}", json!(admin)));
    browser.wait_for("Latest denials");
    assert!(!browser.text().contains("Log out"));
}

/// Returns the source code of axe, which checks the accessibility of web pages.
fn axe() -> String {
    let libraries = repository().join("target/test-python/lib");
    let python = std::fs::read_dir(&libraries).into_iter().flatten();
    let sources = python.map(|folder| {
        let packages: PathBuf = folder.unwrap().path().join("site-packages");
        packages.join("axe_playwright_python/axe.min.js")
    });
    let source = sources.map(std::fs::read_to_string).find_map(Result::ok);
    source.unwrap_or_else(|| panic!("axe is not in {}; run scripts/setup", libraries.display()))
}

/// Checks every view at the size of a laptop, a tablet and a phone, with a light and a dark colour
/// scheme.
#[test]
fn every_view_is_accessible_and_fits_its_screen() {
    let server = server_with_token();
    for _ in 0..4 {
        server.check(&login_request());
        server.check(&json!({"path": "/upload", "customer": "acme"}));
    }
    let block = [
        "block",
        "login",
        "198.51.100.7",
        "--reason",
        "a test",
        "--token",
        TOKEN,
    ];
    assert!(server.operate(&block).status.success());
    let mut browser = Browser::start();
    browser.show_as(SIZES[0], "light");
    browser.open(&url(&server));
    browser.wait_for("Admin token");
    browser.eval(&axe());
    assert_page(&mut browser, "the login");
    log_in(&mut browser, TOKEN);
    for (view, expected) in VIEWS {
        browser.eval(&format!("location.hash = {}", json!(view)));
        browser.wait_for(expected);
        for (size, scheme) in [(SIZES[0], "light"), (SIZES[1], "dark"), (SIZES[2], "light")] {
            browser.show_as(size, scheme);
            assert_page(&mut browser, &format!("{view} at {size:?}, {scheme}"));
        }
    }
    browser.eval("location.hash = '#/keys?rule=login&key=203.0.113.9'");
    browser.click("Block…");
    assert_page(&mut browser, "the dialog");
    browser.press("Escape");
    browser.wait_until("!document.querySelector('dialog')");
}

/// Checks that axe finds no problems and that the page is not wider than the screen.
fn assert_page(browser: &mut Browser, page: &str) {
    let found = browser.eval(
        "axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'], resultTypes: ['violations']}).then(({violations}) =>
           violations.map(({id, nodes}) => `${id}: ${nodes.map(({html}) => html).join(', ')}`))",
    );
    assert_eq!(found, json!([]), "{page}");
    let overflow = browser.eval("document.documentElement.scrollWidth - innerWidth");
    assert!(
        overflow.as_i64().unwrap() <= 0,
        "{page}: {overflow} pixels too wide"
    );
}
