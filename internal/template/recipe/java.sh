# The interpreter's kernel for Java, compiled once.
if [ -f /opt/postern/interpreter/Kernel.java ]; then
	javac -d /opt/postern/interpreter/java /opt/postern/interpreter/Kernel.java
fi
