//! Tests hot reload of GeoIP databases.

use std::{fs, path::Path};

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server, repository, run, tidegate};

const RULES: &str = "geoip: {country: country.mmdb}
rules: [{name: british, when: {country: GB}, limits: [{algorithm: fixed_window, limit: 0, window: 1h}]}]
";

/// Atomically replaces the server's database with the test database `name`.
fn provide(folder: &Path, name: &str) {
    let source = repository()
        .join("crates/identity/tests/maxmind")
        .join(name);
    fs::copy(source, folder.join("country.new")).unwrap();
    fs::rename(folder.join("country.new"), folder.join("country.mmdb")).unwrap();
}

/// Returns the forward-auth status for a client in Britain.
fn british(server: &Server) -> u16 {
    let ask = Ask::get(server.http, "/v1/authorize");
    let ask = ask
        .header("x-forwarded-uri", "/")
        .header("x-forwarded-for", "2.125.160.216");
    ask.send().status
}

#[test]
fn a_renewed_database_is_used_and_an_unusable_one_is_rejected() {
    let scratch = Scratch::new();
    provide(scratch.path(), "GeoLite2-Country-Test.mmdb");
    let mut server = Server::start_in(scratch, &format!("{EVERY_LISTENER}{RULES}"));
    assert_eq!(british(&server), 429);

    provide(server.directory(), "GeoLite2-ASN-Test.mmdb");
    let problem = "geoip.country: cannot use country.mmdb: it is a \"GeoLite2-ASN\" database, which has no country for any address";
    server.wait_for(&["kept the old GeoIP database", problem]);
    assert_eq!(british(&server), 429);
    let ready = Ask::get(server.admin, "/readyz").send().json();
    assert_eq!(
        ready["last_reload"],
        "failed; the old GeoIP database stays active"
    );
    assert_eq!(ready["mistakes"][0], problem);
    let gauge = "tidegate_last_geoip_load_success{database=\"country\"}";
    assert!(server.metrics().contains(&format!("{gauge} 0\n")));
    let refused = Ask::new("POST", server.admin, "/v1/reload").send();
    assert_eq!(refused.status, 422, "{}", refused.body);

    provide(server.directory(), "GeoLite2-Country-Test.mmdb");
    server.signal("HUP");
    server.wait_for(&["reloaded the GeoIP database", "country.mmdb"]);
    assert!(server.metrics().contains(&format!("{gauge} 1\n")));
    assert_eq!(british(&server), 429);
}

#[test]
fn a_missing_database_aborts_the_start() {
    let scratch = Scratch::new();
    let file = scratch.write("rules.yaml", RULES);
    let file = file.to_str().unwrap();
    let output = run(tidegate(&["serve", "--config", file]).current_dir(scratch.path()));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let problem = "geoip.country: cannot use country.mmdb: No such file";
    assert!(message.contains(problem), "{message}");
}
