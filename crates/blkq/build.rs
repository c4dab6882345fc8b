//! The builds of these sources that differ from the plain one, each by one name.

fn main() {
    // No file but this one matters. Profile and flags are inputs of every build script.
    println!("cargo::rerun-if-env-changed=CARGO_PKG_NAME");
    let is_set = |name: &str| std::env::var_os(format!("CARGO_CFG_{name}")).is_some();
    // Threads, locks and atomics are the twins of a model checker.
    let model_check = is_set("LOOM") || is_set("SHUTTLE");
    if model_check {
        println!("cargo::rustc-cfg=model_check");
    }
    // The interface of fuzz targets. Debug builds contain it too, for the tests that replay the corpora.
    let debug = std::env::var("PROFILE").as_deref() == Ok("debug");
    if (is_set("FUZZING") || debug) && !model_check && !is_set("SIMULATION") {
        println!("cargo::rustc-cfg=fuzz_interface");
    }
    if std::env::var("CARGO_PKG_NAME").as_deref() == Ok("blkq-shared-layout") {
        println!("cargo::rustc-cfg=shared_layout");
    }
}
