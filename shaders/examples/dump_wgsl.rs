//! Writes every composed shader to a folder: `cargo run -p lagoon-shaders --example dump_wgsl DIR`.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let dir = PathBuf::from(std::env::args_os().nth(1).ok_or(std::io::Error::other("usage: dump_wgsl DIR"))?);
    std::fs::create_dir_all(&dir)?;
    for (name, source) in lagoon_shaders::sources() {
        std::fs::write(dir.join(format!("{name}.wgsl")), source)?;
    }
    Ok(())
}
