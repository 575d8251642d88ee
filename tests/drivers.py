"""The driver of MySQL and MariaDB for the tests: PyMySQL, which needs no compiler and no headers."""


def install_mysql() -> None:
    """Make Django accept PyMySQL as mysqlclient, whose version it checks."""
    import pymysql

    pymysql.version_info = (2, 2, 8, "final", 0)  # type: ignore[assignment]
    pymysql.install_as_MySQLdb()
