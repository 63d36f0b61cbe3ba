# What the build needed and a sandbox must not carry: proxy settings of the
# host may hold a password.
rm -f /etc/apt/apt.conf.d/99mmdebstrap
printf 'Acquire::Languages "none";\n' >/etc/apt/apt.conf.d/99postern
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
	/var/log/* /tmp/* /var/tmp/* /root/.npm /home/user/.npm
install -d -m 0755 -o root -g root /var/lib/apt/lists/partial /var/cache/apt/archives/partial /var/log/apt
# The identity of the build is not that of any sandbox.
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_* /var/lib/systemd/random-seed
# It names inodes of the build.
rm -f /var/cache/ldconfig/aux-cache
