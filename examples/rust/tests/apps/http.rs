//! Tests of the axum and hyper applications.

use std::thread;

use crate::{
    app::{App, until_shared},
    support::RedisServer,
};

const AXUM: &str = env!("CARGO_BIN_EXE_axum-app");
const HYPER: &str = env!("CARGO_BIN_EXE_hyper-app");
const TOKEN: &str = "authorization: Bearer acme-secret\r\n";

#[test]
fn axum_limits_logins_by_address_and_the_api_by_verified_customer() {
    let app = App::start(AXUM, None);
    let passwords = [
        "sesame", "guess", "sesame", "guess", "sesame", "guess", "sesame",
    ];
    let logins = passwords.map(|password| app.log_in(password));
    assert_eq!(logins, [200, 401, 200, 401, 200, 401, 429]);
    let orders = [(); 6].map(|()| app.status("GET", "/api/orders", TOKEN));
    assert_eq!(orders, [200, 200, 200, 200, 200, 429]);
    // An unverified client must not be treated as the customer that its headers claim.
    let stranger = "authorization: Bearer guessed\r\nx-customer: acme\r\ncustomer: acme\r\n";
    assert_eq!(app.status("GET", "/api/orders", stranger), 200);
    let denied = app.ask("GET", "/api/orders", TOKEN);
    for part in [
        "\r\nratelimit: \"5/min\";r=0;t=",
        "\r\nretry-after: ",
        "\r\ncontent-type: application/problem+json",
        "\"violated-policies\":[\"5/min\"]",
    ] {
        assert!(denied.contains(part), "no {part:?} in {denied}");
    }
}

#[test]
fn hyper_limits_by_address() {
    let app = App::start(HYPER, None);
    let statuses = [(); 4].map(|()| app.status("GET", "/", ""));
    assert_eq!(statuses, [200, 200, 200, 429]);
}

#[test]
fn two_processes_on_one_redis_share_one_limit_exactly() {
    let redis = RedisServer::start();
    let apps = [AXUM, AXUM].map(|program| App::start(program, Some(&redis.url())));
    until_shared(&redis, &apps, |app| {
        app.status("POST", "/login", "");
    });
    let admitted: usize = thread::scope(|scope| {
        let ask = |app| move || [(); 20].iter().filter(|()| passes(app)).count();
        let asked: Vec<_> = apps.iter().map(|app| scope.spawn(ask(app))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).sum()
    });
    assert_eq!(admitted, 5);
}

fn passes(app: &App) -> bool {
    app.status("GET", "/api/orders", TOKEN) == 200
}
