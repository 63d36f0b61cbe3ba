node -e 'process.exit(0)'
npm --version >/dev/null
