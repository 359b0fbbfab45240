//! Tests with log lines written by real servers.

use tidegate_config::Config;

use super::*;
use crate::RulesUnderTest;

const RULES: &str = "
rules:
  - name: everything
    when: {method: {present: true}, path: {present: true}, host: {present: true}, tls.client: {present: true}}
    key: [ip, header.user-agent, query.page, cookie.session, customer, header.x-api-key]
    limits: [1/s]
";

/// Returns the format name, the time, and the entries of one line.
fn read(wanted: &LogFormat, lines: &[&str], mappings: &[&str]) -> (String, u64, String) {
    let sample: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
    let mappings: Vec<EntryMapping> = mappings
        .iter()
        .map(|text| EntryMapping::parse(text).unwrap())
        .collect();
    let format = CompiledFormat::find(wanted, &sample, &mappings).unwrap();
    let record = format.parse(lines[lines.len() - 1]).unwrap();
    let time = record.arrival().unwrap().as_micros() / 1_000;
    let rules = RulesUnderTest::new("rules", Config::parse(RULES).unwrap());
    let values = rules
        .extractor
        .extract(&record.into_parts().unwrap())
        .unwrap();
    let names = rules.extractor.names();
    let entries = values
        .iter()
        .map(|(at, value)| format!("{}={value}", names[*at]));
    (
        format.name.clone(),
        time,
        entries.collect::<Vec<_>>().join(" "),
    )
}

fn detected(line: &str) -> (String, u64, String) {
    read(&LogFormat::Detect, &[line], &[])
}

#[test]
fn the_combined_format_of_nginx_and_apache() {
    let line = r#"203.0.113.9 - - [22/Nov/2026:06:25:14 +0100] "GET /api/orders?page=2 HTTP/1.1" 200 1534 "https://shop.example/" "Mozilla/5.0 (X11; \"Linux\")""#;
    let expected = "header.user-agent=Mozilla/5.0 (X11; \"Linux\") ip=203.0.113.9 method=GET path=/api/orders query.page=2";
    let time = 1_795_325_114_000;
    assert_eq!(detected(line), ("combined".into(), time, expected.into()));
    let forwarded = format!("{line} \"198.51.100.7\"");
    assert_eq!(detected(&forwarded), ("main".into(), time, expected.into()));
    let more = format!("{line} 0.004 \"shop\"");
    let name = "combined, with further fields that are not used";
    assert_eq!(detected(&more), (name.into(), time, expected.into()));
}

#[test]
fn the_common_format_and_that_of_virtual_hosts() {
    let common =
        r#"127.0.0.1 - frank [10/Oct/2000:13:55:36 -0700] "GET /apache_pb.gif HTTP/1.0" 200 2326"#;
    let (name, time, entries) = detected(common);
    assert_eq!((&*name, time), ("common", 971_211_336_000));
    assert_eq!(entries, "ip=127.0.0.1 method=GET path=/apache_pb.gif");
    let hosts = r#"www.example.com:443 2001:db8::7 - - [10/Oct/2000:13:55:36 -0700] "HEAD / HTTP/1.1" 304 - "-" "curl/8.5.0""#;
    let (name, _, entries) = detected(hosts);
    assert_eq!(name, "vhost_combined");
    let expected =
        "header.user-agent=curl/8.5.0 host=www.example.com ip=2001:db8:: method=HEAD path=/";
    assert_eq!(entries, expected);
}

#[test]
fn the_logs_of_caddy() {
    let line = r#"{"level":"info","ts":1795325114.2501,"logger":"http.log.access.log0","msg":"handled request","request":{"remote_ip":"203.0.113.9","remote_port":"41342","client_ip":"203.0.113.9","proto":"HTTP/2.0","method":"GET","host":"api.example:8443","uri":"/api/orders?page=2","headers":{"User-Agent":["curl/8.5.0"],"X-Api-Key":["acme"],"Cookie":["REDACTED"],"Accept":["*/*"]},"tls":{"resumed":false,"version":772}},"bytes_read":0,"user_id":"","duration":0.25,"size":12,"status":200,"resp_headers":{"Server":["Caddy"]}}"#;
    let (name, time, entries) = detected(line);
    assert_eq!((&*name, time), ("caddy", 1_795_325_114_000));
    let expected = "header.user-agent=curl/8.5.0 header.x-api-key=acme host=api.example ip=203.0.113.9 method=GET path=/api/orders query.page=2";
    assert_eq!(entries, expected);
}

#[test]
fn the_access_log_of_tidegate() {
    let line = r#"{"time":"2026-11-22T05:25:14.250000Z","client":"203.0.113.9","method":"GET","host":"api.example","path":"/api/%6Frders","query":"page=2","version":"HTTP/1.1","status":429,"bytes":123,"complete":true,"duration_us":81,"upstream":null,"address":null,"reason":"limit","rule":"api","user_agent":"curl/8.5.0"}"#;
    let (name, time, entries) = detected(line);
    assert_eq!((&*name, time), ("tidegate", 1_795_325_114_250));
    let expected = "header.user-agent=curl/8.5.0 host=api.example ip=203.0.113.9 method=GET path=/api/orders query.page=2";
    assert_eq!(entries, expected);
}

#[test]
fn the_logs_of_traefik() {
    let line = r#"203.0.113.9 - - [22/Nov/2026:05:25:14 +0000] "GET /api HTTP/1.1" 200 12 "-" "curl/8.5.0" 7 "api@docker" "http://10.0.0.3:80" 4ms"#;
    let expected = "header.user-agent=curl/8.5.0 ip=203.0.113.9 method=GET path=/api";
    assert_eq!(
        detected(line),
        ("traefik".into(), 1_795_325_114_000, expected.into())
    );
    let json = r#"{"ClientAddr":"203.0.113.9:40110","ClientHost":"203.0.113.9","DownstreamContentSize":12,"DownstreamStatus":200,"Duration":4000000,"RequestHost":"api.example","RequestMethod":"GET","RequestPath":"/api?page=2","StartUTC":"2026-11-22T05:25:14.25Z","request_User-Agent":"curl/8.5.0","time":"2026-11-22T05:25:15Z"}"#;
    let expected = "header.user-agent=curl/8.5.0 host=api.example ip=203.0.113.9 method=GET path=/api query.page=2";
    assert_eq!(
        detected(json),
        ("traefik-json".into(), 1_795_325_114_250, expected.into())
    );
}

#[test]
fn the_default_format_of_envoy() {
    let line = r#"[2016-04-15T20:17:00.310Z] "POST /api/v1/locations HTTP/2" 204 - 154 0 226 100 "203.0.113.9,10.0.35.28" "nsq2http" "cc21d9b0-cf5c-432b-8c7e-98aeb7988cd2" "locations" "tcp://10.0.2.1:80""#;
    let expected = "header.user-agent=nsq2http host=locations ip=10.0.35.28 method=POST path=/api/v1/locations";
    assert_eq!(
        detected(line),
        ("envoy".into(), 1_460_751_420_310, expected.into())
    );
    // Envoy logs client values without escapes.
    let line = line.replace("nsq2http", r#"te"st\"#);
    let expected = expected.replace("nsq2http", r#"te"st\"#);
    assert_eq!(detected(&line).2, expected);
}

#[test]
fn the_http_log_of_haproxy() {
    for captures in ["{1wt.eu} {} ", "{a|b} ", ""] {
        let line = format!(
            r#"Feb  6 12:14:14 localhost haproxy[14389]: 10.0.1.2:33317 [06/Feb/2009:12:14:14.655] http-in static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 {captures}"GET /index.html HTTP/1.1""#
        );
        let expected = "ip=10.0.1.2 method=GET path=/index.html";
        assert_eq!(
            detected(&line),
            ("haproxy".into(), 1_233_922_454_655, expected.into())
        );
    }
}

#[test]
fn a_log_format_of_nginx_with_more_variables() {
    let format = LogFormat::parse(
        r#"$remote_addr [$msec] $request_method "$uri" "$args" $http_host $request_time "$http_x_api_key" $customer "$cookie_session""#,
    )
    .unwrap();
    let line = r#"203.0.113.9 [1795325114.250] GET "/api" "page=2" api.example 0.250 "acme.x" umbrella "s1""#;
    let (name, time, entries) = read(&format, &[line], &["customer=$customer"]);
    assert_eq!((&*name, time), ("nginx", 1_795_325_114_000));
    let expected = "cookie.session=s1 customer=umbrella header.x-api-key=acme.x host=api.example ip=203.0.113.9 method=GET path=/api query.page=2";
    assert_eq!(entries, expected);
}

#[test]
fn json_that_nginx_writes() {
    let line = r#"{"time_iso8601":"2026-11-22T05:25:14+00:00","remote_addr":"203.0.113.9","request":"GET /api?page=2 HTTP/1.1","status":"200","request_time":"1.000","http_x_api_key":"acme","user":{"id":17}}"#;
    let (name, time, entries) = read(&LogFormat::Detect, &[line], &["customer=user.id"]);
    assert_eq!((&*name, time), ("json", 1_795_325_113_000));
    let expected =
        "customer=17 header.x-api-key=acme ip=203.0.113.9 method=GET path=/api query.page=2";
    assert_eq!(entries, expected);
}

#[test]
fn csv_with_a_header() {
    let lines = [
        "timestamp,client_ip,method,url,tenant",
        "1795325114,203.0.113.9,GET,\"/a,b?page=2\",acme",
    ];
    let (name, time, entries) = read(
        &LogFormat::Detect,
        &lines,
        &["customer=tenant", "tls.client=tenant"],
    );
    assert_eq!((&*name, time), ("csv", 1_795_325_114_000));
    assert_eq!(
        entries,
        "customer=acme ip=203.0.113.9 method=GET path=/a,b query.page=2 tls.client=acme"
    );
}

/// If the command line maps a field to an entry, this field takes precedence over other fields in
/// the log.
#[test]
fn mapped_entries_come_first() {
    let line = r#"{"time":1795325114,"started":1795325000,"client":"203.0.113.9","real":"198.51.100.7:80","path":"/x","old":"/y"}"#;
    let mappings = ["ip=real", "time=started", "path=old"];
    let (_, time, entries) = read(&LogFormat::Detect, &[line], &mappings);
    assert_eq!(
        (time, &*entries),
        (1_795_325_000_000, "ip=198.51.100.7 path=/y")
    );
}

#[test]
fn an_unknown_format_names_the_nearest_and_the_difference() {
    let unknown = |wanted: &LogFormat, line: &str, mappings: &[EntryMapping]| {
        let unknown = CompiledFormat::find(wanted, &[line.to_owned()], mappings).unwrap_err();
        (unknown.nearest, unknown.error.column, unknown.error.problem)
    };
    let line = r#"203.0.113.9 - - [22/Nov/2026:06:25:14 +0100] "GET / HTTP/1.1" ok 12"#;
    let problem = "expected ` \"` after `body_bytes_sent`".to_owned();
    assert_eq!(
        unknown(&LogFormat::Detect, line, &[]),
        ("combined".into(), 66, problem)
    );
    let problem = "expected a number".to_owned();
    let common = LogFormat::Named("common");
    assert_eq!(unknown(&common, line, &[]), ("common".into(), 63, problem));
    let (nearest, column, problem) = unknown(&LogFormat::Named("envoy"), line, &[]);
    assert_eq!((&*nearest, column, &*problem), ("envoy", 1, "expected `[`"));
    let (nearest, _, problem) = unknown(&LogFormat::Detect, r#"{"a": 1}"#, &[]);
    assert!(
        nearest == "json" && problem.contains("the fields are a"),
        "{problem}"
    );
    let line = r#"203.0.113.9 - - [22/Nov/2026:06:25:14 +0100] "GET / HTTP/1.1" 200 12"#;
    let mapping = EntryMapping::parse("customer=tenant").unwrap();
    let (nearest, _, problem) = unknown(&LogFormat::Detect, line, &[mapping]);
    assert_eq!(nearest, "common");
    assert_eq!(
        problem,
        "`tenant` is not a field of the log format; its fields are h, l, u, t, r, s, b"
    );
}

#[test]
fn format_names_and_strings_are_checked() {
    let refused = |text: &str| LogFormat::parse(text).unwrap_err();
    assert!(refused("cady").contains("did you mean `caddy`?"));
    assert!(refused("$remote_addr $status").starts_with("the format has no time"));
    assert!(refused("%h %b").starts_with("the format has no time"));
    assert!(refused("%h%b").starts_with("the Apache log format `h` and `b` have no text between"));
    assert_eq!(LogFormat::parse("csv"), Ok(LogFormat::Named("csv")));
    assert_eq!(LogFormat::parse("auto"), Ok(LogFormat::Detect));
    for text in ["", "customer", "=x", "x=", "header.a b=x"] {
        assert!(EntryMapping::parse(text).is_err(), "{text}");
    }
}

/// Half of the lines may be damaged.
#[test]
fn a_damaged_log_is_still_detected() {
    let good = r#"127.0.0.1 - - [10/Oct/2000:13:55:36 -0700] "GET / HTTP/1.0" 200 1"#;
    let sample: Vec<String> = ["garbage", good, "\u{fffd}", "more"]
        .map(str::to_owned)
        .into();
    let format = CompiledFormat::find(&LogFormat::Detect, &sample, &[]).unwrap();
    assert_eq!(format.name, "common");
    let json = r#"{"time":1795325114,"client":"203.0.113.9"}"#.to_owned();
    let sample = ["garbage".to_owned(), json];
    let format = CompiledFormat::find(&LogFormat::Detect, &sample, &[]).unwrap();
    assert_eq!(format.name, "json");
    let mut rare = vec!["garbage".to_owned(); 20];
    rare.push(good.to_owned());
    assert!(CompiledFormat::find(&LogFormat::Detect, &rare, &[]).is_err());
}

proptest::proptest! {
    #[test]
    fn no_line_makes_a_parser_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200), text in "[ -~\"\\\\\\[\\]{}:,é]{0,120}") {
        for line in [&*String::from_utf8_lossy(&bytes), &text] {
            parse_all(line);
        }
    }

    #[test]
    fn no_damage_makes_a_parser_panic(
        at in 0_usize..200,
        byte in proptest::prelude::any::<char>(),
        which in 0_usize..6,
    ) {
        let lines = [
            r#"203.0.113.9 - - [22/Nov/2026:06:25:14 +0100] "GET /api/orders?page=2 HTTP/1.1" 200 1534 "-" "Moz\x22illa" "x""#,
            r#"[2016-04-15T20:17:00.310Z] "POST /api/v1/locations HTTP/2" 204 - 154 0 226 100 "203.0.113.9,10.0.35.28" "nsq2http" "c" "locations" "tcp://10.0.2.1:80""#,
            r#"Feb  6 12:14:14 localhost haproxy[14389]: 10.0.1.2:33317 [06/Feb/2009:12:14:14.655] http-in static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 "GET / HTTP/1.1""#,
            r#"{"time":"2026-11-22T05:25:14Z","client":"203.0.113.9","path":"/a","status":200}"#,
            r#"{"ts":1795325114.25,"request":{"remote_ip":"::1","uri":"/a?b","headers":{"A":["b"]}},"duration":0.5}"#,
            "time,client_ip,url\n",
        ];
        let mut line: Vec<char> = lines[which].chars().collect();
        let at = at % line.len();
        line[at] = byte;
        parse_all(&line.into_iter().collect::<String>());
    }
}
