//! Tests of configurations from environment variables.

use super::*;

fn read(variables: &[(&str, &str)]) -> Result<FromEnvironment, Vec<String>> {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    from_environment(&variables.iter().map(own).collect())
}

#[test]
fn redis_settings_come_from_the_variables() {
    for (variables, store) in [
        (
            &[("REDIS_URL", "redis:6379")][..],
            "{redis: 'redis://redis:6379'}",
        ),
        (
            &[
                ("REDIS_URL", "r:1"),
                ("REDIS_SOCKET_TYPE", "tcp"),
                ("REDIS_TLS", "true"),
                ("REDIS_AUTH", "me:se:cret"),
                ("CACHE_KEY_PREFIX", "rl:"),
            ],
            "{redis: 'rediss://r:1', username: me, password: 'se:cret', prefix: 'rl:'}",
        ),
        (
            &[("REDIS_URL", "/run/redis.sock"), ("REDIS_AUTH", "x")],
            "{redis: 'redis+unix:///run/redis.sock', password: x}",
        ),
        (
            &[("REDIS_TYPE", "cluster"), ("REDIS_URL", "a:1,b:2")],
            "{redis: {cluster: ['redis://a:1', 'redis://b:2']}}",
        ),
        (
            &[
                ("REDIS_TYPE", "SENTINEL"),
                ("REDIS_URL", "main,a:1,b:2"),
                ("REDIS_SENTINEL_AUTH", "p@ss"),
            ],
            "{redis: {sentinel: ['redis://:p%40ss@a:1', 'redis://b:2'], primary: main}}",
        ),
    ] {
        let expected = Config::parse(&format!("store: {store}")).unwrap().redis;
        assert!(expected.is_some());
        assert_eq!(
            read(variables).unwrap().config.redis,
            expected,
            "{variables:?}"
        );
    }
    for (variables, expected) in [
        (
            &[("REDIS_URL", "r:1"), ("REDIS_TYPE", "ring")][..],
            "REDIS_TYPE: expected one of SINGLE, SENTINEL, CLUSTER",
        ),
        (
            &[("REDIS_URL", "r:1"), ("BACKEND_TYPE", "memcache")],
            "BACKEND_TYPE: counts are kept in Redis or in the memory",
        ),
        (
            &[("BACKEND_TYPE", "memcache")],
            "BACKEND_TYPE: counts are kept in Redis or in the memory",
        ),
        (
            &[("REDIS_URL", "r:what")],
            "REDIS_URL and related variables: the host or the port is not valid; expected a URL",
        ),
        (
            &[
                ("REDIS_URL", "r:1"),
                ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
            ],
            "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION: ",
        ),
    ] {
        let problems = read(variables).unwrap_err();
        assert!(problems[0].starts_with(expected), "{problems:?}");
    }
}

#[test]
fn only_variables_without_effect_are_reported() {
    let read = read(&[
        ("REDIS_URL", "r:1"),
        ("REDIS_POOL_SIZE", "5"),
        ("USE_STATSD", ""),
        ("PATH", "/bin"),
        ("LOG_FORMAT", "json"),
    ]);
    let read = read.unwrap();
    assert_eq!(read.json_log, Some(true));
    let ignored = read.ignored;
    assert_eq!(ignored.len(), 1, "{ignored:?}");
    assert!(ignored[0].starts_with("REDIS_POOL_SIZE is ignored: the Redis store"));
}

fn warnings(variables: &[(&str, &str)]) -> Vec<String> {
    let config = read(variables).unwrap().config;
    config.warnings.iter().map(ToString::to_string).collect()
}

#[test]
fn an_open_listener_causes_a_warning() {
    let open = |variable: &str, address: &str| {
        format!("{variable}: open-listener: other machines can reach {address}, and any client")
    };
    // By default, the listeners accept connections on all addresses, as in envoyproxy/ratelimit.
    let messages = warnings(&[]);
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(
        messages[0].starts_with(&open("HOST", "0.0.0.0:8080")),
        "{messages:?}"
    );
    let grpc = open("GRPC_HOST", "0.0.0.0:8081");
    assert!(messages[1].starts_with(&grpc), "{messages:?}");
    let loopback = ("HOST", "127.0.0.1");
    let tls = [
        loopback,
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", "a.pem"),
        ("GRPC_SERVER_TLS_KEY", "a.key"),
    ];
    assert_eq!(warnings(&tls).len(), 1, "any client may speak TLS");
    let authority = ("GRPC_CLIENT_TLS_CACERT", "ca.pem");
    for guarded in [
        [&tls[..], &[authority]].concat(),
        vec![loopback, ("GRPC_HOST", "localhost")],
    ] {
        assert_eq!(warnings(&guarded), Vec::<String>::new(), "{guarded:?}");
    }
}

#[test]
fn redis_variables_without_a_url_are_reported() {
    let read = read(&[("BACKEND_TYPE", "redis"), ("REDIS_TYPE", "SINGLE")]);
    for ignored in read.unwrap().ignored {
        let why = "is ignored: without REDIS_URL, counts are kept in the memory of this process";
        assert!(ignored.ends_with(why), "{ignored}");
    }
}

#[test]
fn durations_use_the_notation_of_go() {
    for (text, expected) in [
        ("24h", Some(86_400_000)),
        ("1h30m", Some(5_400_000)),
        ("500ms", Some(500)),
        ("10s", Some(10_000)),
    ] {
        assert_eq!(span(text), expected.map(Duration::from_millis), "{text}");
    }
    for text in [
        "",
        "0s",
        "10",
        "h",
        "1d",
        "-1s",
        "1h 2m",
        "99999999999999999999h",
    ] {
        assert_eq!(span(text), None, "{text}");
    }
}
