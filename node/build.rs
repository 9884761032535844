//! Tells the linker where libtorch lies at run time: torch-sys gives dependents no rpath.

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if std::env::var_os("CARGO_FEATURE_TORCH").is_none() {
        return;
    }
    if let Some(folder) = std::env::var_os("LIBTORCH") {
        let lib = std::path::Path::new(&folder).join("lib");
        let lib = lib.canonicalize().unwrap_or(lib);
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
